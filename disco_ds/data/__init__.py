"""Training and evaluation data: webdataset shards as they really are."""
