"""Image retrieval: images -> batches -> embeddings -> loss, and exact evaluation."""
