"""Retrieval: items -> batches -> embeddings -> loss, and exact evaluation.

Nothing here depends on what is embedded, apart from :mod:`rankgrad.lab.retrieval.images`.
"""
