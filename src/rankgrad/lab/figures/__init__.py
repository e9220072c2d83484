"""The figures of the paper and of the documentation, one file a figure. Needs matplotlib."""
