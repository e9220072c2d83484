"""What retrieval and detection share about images: folders, pixels in memory, pretrained weights."""
