"""What every training run shares, whatever it learns: settings, the loop, checkpoints, logs, the report's frame.

A subject (retrieval, detection) gives a :class:`rankgrad.training.loop.Task` and its settings; nothing in here
knows pictures or boxes.
"""
