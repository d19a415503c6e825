"""Parts of bench/builder.py."""
