"""Image retrieval: pictures -> batches -> embeddings -> loss, and exact evaluation."""
