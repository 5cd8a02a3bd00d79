// The explorer of changed answers. Its selection stands in the URL's fragment, so that a link restores it.
const Flips = (data) => {
  const PAGE = 10;
  const form = byId("flip-filter");
  const KINDS = { c2w: ["right → wrong", "worse"], w2c: ["wrong → right", "better"], w2w: ["wrong → other wrong", "same"] };
  const DEFAULTS = { variant: "", task: "", category: "", change: "", margin: "0", text: "" };
  // One flat list: [variant, item, kind, kl, the variant's side], most confident baseline first.
  const flips = data.changes.flatMap((listed, variant) => listed.map((change) => [variant, ...change]));
  const margin = (item) => data.items[item][8];
  flips.sort((a, b) => (margin(b[1]) ?? -1) - (margin(a[1]) ?? -1) || a[1] - b[1] || a[0] - b[0]);
  const changedBy = new Map();
  for (const [variant, item] of flips) changedBy.set(item, [...(changedBy.get(item) ?? []), variant]);
  let found = [];
  let shown = 0;

  const every = (names) => [["", "all"], ...names.map((name) => [name, name])];
  fill(form.elements.variant, every(data.variants));
  fill(form.elements.task, every(data.tasks));
  fill(form.elements.category, every([...data.categories].sort()));
  fill(form.elements.change, [["", "all"], ...Object.entries(KINDS).map(([kind, [text]]) => [kind, text])]);

  const state = () => Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, form.elements[name].value]));

  function fragment() {
    const chosen = Object.entries(state()).filter(([name, value]) => value !== DEFAULTS[name]);
    return "#flips" + (chosen.length ? "?" + new URLSearchParams(chosen) : "");
  }

  function restore() {
    const [target, query = ""] = location.hash.split("?");
    if (target !== "#flips") return false;
    const given = new URLSearchParams(query);
    for (const name of Object.keys(DEFAULTS)) form.elements[name].value = given.get(name) ?? DEFAULTS[name];
    return true;
  }

  function select() {
    const { variant, task, category, change, margin: least, text } = state();
    const words = text.trim().toLowerCase();
    const rest = data.items.map((item) => {
      if (task && data.tasks[item[1]] !== task) return false;
      if (category && data.categories[item[2]] !== category) return false;
      if (+least > 0 && !(item[8] >= 10 * least)) return false;
      return !words || [item[0], item[4], ...(item[5] ?? [])].some((part) => part.toLowerCase().includes(words));
    });
    const which = variant ? data.variants.indexOf(variant) : -1;
    found = flips.filter(([v, item, kind]) => rest[item] && (which < 0 || v === which) && (!change || kind === change));
    shown = 0;
    byId("flip-list").replaceChildren();
    byId("flip-count").textContent = `${counted(found.length, "changed answer", "changed answers")} in this selection.`;
    byId("flip-link").textContent = fragment();
    byId("flip-link").setAttribute("href", fragment());
    more();
  }

  function more() {
    byId("flip-list").append(...found.slice(shown, shown + PAGE).map(card));
    shown = Math.min(shown + PAGE, found.length);
    byId("flip-more").hidden = shown >= found.length;
    byId("flip-more").textContent = `Show more (${shown.toLocaleString("en")} of ${found.length.toLocaleString("en")} shown)`;
  }

  function share(thousandths) {
    const bar = element("span", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${(70 * thousandths) / 1000}px`;
    return [bar, percent(thousandths)];
  }

  function options(item, side) {
    const [texts, gold, baseline] = [item[5], item[6], item[9]];
    const rows = texts.map((text, i) => {
      const tags = [
        i === gold && texts.length > 1 ? "right answer" : null,
        i === baseline.choice ? "baseline's answer" : null,
        i === side.choice ? "variant's answer" : null,
      ].filter(Boolean).join(" · ");
      return element("tr", {},
        element("th", { scope: "row" }, text, tags ? element("small", {}, tags) : null),
        element("td", { class: "n" }, ...share(baseline.p[i])),
        element("td", { class: "n" }, ...share(side.p[i])));
    });
    const head = ["Option", "Baseline", "Variant"].map((name, i) => element("th", { scope: "col", class: i ? "n" : "" }, name));
    return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
  }

  function texts(item, side) {
    const two = (name, text) => element("div", {}, element("h4", {}, name), element("pre", {}, text ?? "no answer"));
    const accepted = (item[7] ?? []).join(" / ");
    return element("div", {},
      accepted ? element("p", { class: "note" }, `Accepted: ${accepted}`) : null,
      element("div", { class: "sides" }, two("Baseline", item[9].text), two("Variant", side.text)));
  }

  function card([variant, place, kind, kl, side]) {
    const item = data.items[place];
    const [text, style] = KINDS[kind];
    const numbers = [
      item[8] === null ? null : `baseline's margin ${percent(item[8])}`,
      kl === null ? null : `KL ${kl} nats`,
    ].filter(Boolean).join(" · ");
    const where = [data.tasks[item[1]], item[2] === null ? null : data.categories[item[2]], item[0]].filter((part) => part !== null).join(" · ");
    const others = changedBy.get(place).filter((other) => other !== variant).map((other) => data.variants[other]);
    const examples = data.prefixes[item[3]];
    return element("article", {},
      element("h3", {}, data.variants[variant], " ", element("span", { class: style }, text), element("small", {}, numbers)),
      element("p", { class: "note" }, where),
      examples ? element("details", {}, element("summary", {}, "The prompt begins with"), element("pre", {}, examples)) : null,
      element("div", { class: "item" }, element("pre", {}, item[4]), item[5] ? options(item, side) : texts(item, side)),
      element("p", { class: "note" }, others.length ? `Also changed by ${others.slice(0, 12).join(", ")}${others.length > 12 ? ` and ${others.length - 12} more` : ""}.` : "No other variant changed it."));
  }

  const changed = () => {
    select();
    note(fragment());
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", settled(changed, 200));
  byId("flip-more").addEventListener("click", more);
  addEventListener("hashchange", () => restore() && select());
  const asked = restore();
  select();
  if (asked) byId("flips").scrollIntoView();
};
