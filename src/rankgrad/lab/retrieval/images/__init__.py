"""Retrieval of images: data sets, crops, networks."""
