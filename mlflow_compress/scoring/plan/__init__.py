"""Plans a pass: encodes requests, cuts corpora into windows, and packs both into batches."""
