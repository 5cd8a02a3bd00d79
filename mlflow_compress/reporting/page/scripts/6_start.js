// Starts what the data and the page have.
Scores.filter();
unpack().then((data) => {
  Figures(data.scores, data.alike);
  if (data.changes && data.changes.total > 0) Flips(data.changes);
  if (data.answers) Answers(data.answers);
  document.documentElement.dataset.ready = Math.round(performance.now()); // milliseconds since the page was asked for
});
