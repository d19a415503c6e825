"""Parts of the program bench/snapshot.py."""
