"""The sample order and the loader. The order is a pure function; the loader reads what it says. No torch."""

from isthmus.storage.stream.batch import Batch
from isthmus.storage.stream.describe import RowPlace
from isthmus.storage.stream.loader import Loader
from isthmus.storage.stream.order import Order, check_world_size
from isthmus.storage.stream.plan import Plan, Segment

__all__ = ["Batch", "Loader", "Order", "Plan", "RowPlace", "Segment", "check_world_size"]
