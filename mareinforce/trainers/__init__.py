"""The Python way in: one trainer class an algorithm."""
