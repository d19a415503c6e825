"""The one place that holds the version of both packages."""

__version__ = "0.1.0"
