"""``python -m isthmus`` is the ``isthmus`` command."""

from isthmus.cli.app import main

if __name__ == "__main__":
    main()
