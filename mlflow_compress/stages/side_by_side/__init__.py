"""Many variants of one evaluation side by side: their scoreboard, and the page that shows it."""
