"""Faults planted one by one in a copy of the library, and the laws that catch them: see `__main__.py`."""
