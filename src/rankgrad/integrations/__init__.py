"""rankgrad inside the trainers of other libraries: one module an ecosystem, each importable with its package only.

- :mod:`rankgrad.integrations.sentence_transformers`: losses for bi-encoders and cross-encoders, a batch sampler,
  checkpoints that keep the loss's state;
- :mod:`rankgrad.integrations.torchmetrics`: the metrics of :mod:`rankgrad.metrics` as ``Metric`` classes;
- :mod:`rankgrad.integrations.pytorch_metric_learning`: the losses behind its base class, with miners, reducers,
  distances and its wrappers.

accelerate, Lightning and the Hugging Face ``Trainer`` need no module: losses and samplers work there as they are.
"""
