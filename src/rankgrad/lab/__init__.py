"""What the command ``rankgrad`` does: training, recipes, reports, figures, benchmarks.

The library never imports it.
"""
