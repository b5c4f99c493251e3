"""`python -m arraycomm`: the command line interface."""

import sys

from arraycomm.cli import main

if __name__ == "__main__":
    sys.exit(main())
