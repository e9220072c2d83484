"""What every training run shares, whatever it learns: settings, the loop, checkpoints, logs.

A task (:class:`rankgrad.lab.training.task.Task`) brings data, network and loss; nothing in here depends
on images or boxes.
"""
