"""Tests of jaxmagma and the demo; they mirror the two packages."""
