"""Retrieval of texts: a sentence-transformers model fine-tuned on labelled texts, pairs or graded lists."""
