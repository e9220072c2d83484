"""Object detection as a task of the command: VOC readers, the network, batches, evaluation, report."""
