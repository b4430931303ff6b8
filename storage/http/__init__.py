"""HTTP for bulk bytes: addresses that authorise requests, and connections that fill the caller's memory."""
