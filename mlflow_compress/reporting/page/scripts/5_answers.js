// The answers of baseline and variant to the same instructions, with the words that differ marked.
const Answers = (data) => {
  const PAGE = 5;
  const LONGEST = 6000; // characters; marking differences takes long in longer answers
  const form = byId("answer-filter");
  let found = [];
  let shown = 0;
  fill(form.elements.variant, Object.keys(data.variants).map((name) => [name, name]), Scores.first);

  function select() {
    const answers = data.variants[form.elements.variant.value];
    found = data.prompts
      .map(([id, turn, prompt, text, grade], i) => ({ id, turn, prompt, text, grade, other: answers[i][0], otherGrade: answers[i][1] }))
      .filter((pair) => !form.elements.differing.checked || pair.text !== pair.other);
    shown = 0;
    byId("answer-list").replaceChildren();
    byId("answer-count").textContent = `${counted(found.length, "answer", "answers")} of each model.`;
    more();
  }

  function more() {
    byId("answer-list").append(...found.slice(shown, shown + PAGE).map(card));
    shown = Math.min(shown + PAGE, found.length);
    byId("answer-more").hidden = shown >= found.length;
  }

  /** Return both answers with what only one of them has marked. */
  function marked(text, other) {
    if (text === null || other === null || text.length + other.length > LONGEST) return [[text ?? "no answer"], [other ?? "no answer"]];
    const parts = Libraries.diffWordsWithSpace(text, other);
    const side = (skip, kept, name) => parts.filter((part) => !part[skip]).map((part) => (part[kept] ? element(name, {}, part.value) : part.value));
    return [side("added", "removed", "del"), side("removed", "added", "ins")];
  }

  function card(pair) {
    const [left, right] = marked(pair.text, pair.other);
    const head = (name, grade) => element("h4", {}, name, grade === null ? "" : ` · grade ${grade.toFixed(1)} of 10`);
    return element("article", {},
      element("h3", {}, pair.id, element("small", {}, `turn ${pair.turn + 1}${pair.text === pair.other ? " · the same answer" : ""}`)),
      element("pre", {}, pair.prompt),
      element("div", { class: "sides" },
        element("div", {}, head("Baseline", pair.grade), element("pre", {}, ...left)),
        element("div", {}, head(form.elements.variant.value, pair.otherGrade), element("pre", {}, ...right))));
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", select);
  byId("answer-more").addEventListener("click", more);
  select();
};
