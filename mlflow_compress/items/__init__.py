"""Where items come from: question files and corpora, as requests for scoring and `Items` for metrics."""
