"""One file a figure: data in, a matplotlib figure with its title and caption out."""
