"""What retrieval and detection share about pictures: folders, pixels in memory, pretrained weights."""
