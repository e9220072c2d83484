"""Retrieval: items -> batches -> embeddings -> loss, and exact evaluation.

Nothing here knows what is embedded, apart from :mod:`rankgrad.lab.retrieval.images`.
"""
