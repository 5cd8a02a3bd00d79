// The explorer of changed answers. Its selection stands in the URL's fragment, so that a link restores it.
const Flips = (data) => {
  const PAGE = 10;
  const form = byId("flip-filter");
  const KINDS = { c2w: ["right → wrong", "worse"], w2c: ["wrong → right", "better"], w2w: ["wrong → other wrong", "same"] };
  const DEFAULTS = { variant: "", against: "", task: "", category: "", change: "", margin: "0", text: "" };
  // What each variant changed, by item. An item that it did not change, it answered as the baseline did.
  const changes = data.changes.map((listed) => new Map(listed.map(([item, kind, kl, side]) => [item, { kind, kl, side }])));
  const unscored = data.unscored.map((places) => new Set(places));
  const wasRight = [];
  for (const own of changes) for (const [item, { kind }] of own) wasRight[item] = kind === "c2w";
  const margin = (item) => data.items[item][8] ?? -1;
  const rank = []; // the most confident baseline first
  data.items.map((_, item) => item).sort((a, b) => margin(b) - margin(a) || a - b).forEach((item, place) => (rank[item] = place));
  let found = [];
  let shown = 0;

  const every = (names) => [["", "all"], ...names.map((name) => [name, name])];
  fill(form.elements.variant, every(data.variants), Scores.first);
  fill(form.elements.against, [["", "the baseline"], ...data.variants.map((name) => [name, name])]);
  fill(form.elements.task, every(data.tasks));
  fill(form.elements.category, every([...data.categories].sort()));
  fill(form.elements.change, [["", "all"], ["flip", "right ↔ wrong"], ...Object.entries(KINDS).map(([kind, [text]]) => [kind, text])]);

  const state = () => Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, form.elements[name].value]));

  const fragmentOf = (state) => {
    const chosen = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
    return "#flips" + (chosen.length ? "?" + new URLSearchParams(chosen) : "");
  };

  function restore(fragment) {
    const [target, query = ""] = fragment.split("?");
    if (target !== "#flips") return false;
    const given = new URLSearchParams(query);
    for (const name of Object.keys(DEFAULTS)) form.elements[name].value = given.get(name) ?? DEFAULTS[name];
    return true;
  }

  /** Return how a variant's answer differs from that of another one, or of the baseline (-1); null where it does not. */
  function difference(variant, other, item) {
    if ([variant, other].some((one) => unscored[one]?.has(item))) return null;
    const [before, after] = [other, variant].map((one) => {
      const change = changes[one]?.get(item);
      return { right: change ? change.kind === "w2c" : wasRight[item], choice: (change?.side ?? data.items[item][9]).choice };
    });
    if (before.right !== after.right) return before.right ? "c2w" : "w2c";
    return !before.right && before.choice !== after.choice ? "w2w" : null;
  }

  function select() {
    const { variant, against, task, category, change, margin: least, text } = state();
    const words = text.trim().toLowerCase();
    const rest = data.items.map((item) => {
      if (task && data.tasks[item[1]] !== task) return false;
      if (category && data.categories[item[2]] !== category) return false;
      if (+least > 0 && !(item[8] >= 10 * least)) return false;
      return !words || [item[0], item[4], ...(item[5] ?? [])].some((part) => part.toLowerCase().includes(words));
    });
    const other = data.variants.indexOf(against);
    found = [];
    data.variants.forEach((name, own) => {
      if (own === other || (variant && name !== variant)) return;
      for (const item of new Set([...changes[own].keys(), ...(changes[other]?.keys() ?? [])])) {
        const kind = rest[item] ? difference(own, other, item) : null;
        if (kind && (!change || kind === change || (change === "flip" && kind !== "w2w"))) found.push([own, other, item, kind]);
      }
    });
    found.sort((a, b) => rank[a[2]] - rank[b[2]] || a[0] - b[0]);
    shown = 0;
    byId("flip-list").replaceChildren();
    byId("flip-count").textContent = other < 0
      ? `${counted(found.length, "changed answer", "changed answers")} in this selection.`
      : `${counted(found.length, "answer", "answers")} in this selection that ${found.length === 1 ? "differs" : "differ"} from ${against}'s.`;
    byId("flip-link").textContent = fragmentOf(state());
    byId("flip-link").setAttribute("href", fragmentOf(state()));
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

  function options(item, models) {
    const [texts, gold] = [item[5], item[6]];
    const measured = models.filter((model) => model.side);
    const rows = texts.map((text, i) => {
      const tags = [
        i === gold && texts.length > 1 ? "right answer" : null,
        ...models.map(({ name, side }, place) => (i === (side ?? item[9]).choice ? `${place ? name : "baseline"}'s answer` : null)),
      ].filter(Boolean).join(" · ");
      return element("tr", {},
        element("th", { scope: "row" }, text, tags ? element("small", {}, tags) : null),
        ...measured.map(({ side }) => element("td", { class: "n" }, ...share(side.p[i]))));
    });
    const head = ["Option", ...measured.map(({ name }) => name)].map((name, i) => element("th", { scope: "col", class: i ? "n" : "" }, name));
    return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
  }

  function texts(item, models) {
    const accepted = (item[7] ?? []).join(" / ");
    return element("div", {},
      accepted ? element("p", { class: "note" }, `Accepted: ${accepted}`) : null,
      element("div", { class: "sides" }, ...models.filter(({ side }) => side).map(({ name, side }) =>
        element("div", {},
          element("h4", {}, name, "concluded" in side ? `: ${side.concluded ?? "no answer that can be read"}` : null),
          element("pre", {}, side.text ?? "no answer")))));
  }

  function card([variant, other, place, kind]) {
    const item = data.items[place];
    const [text, style] = KINDS[kind];
    const compared = [other, variant].filter((one) => one >= 0);
    // What a variant answered is in the data where it changed the baseline's answer.
    const models = [{ name: "Baseline", side: item[9] }, ...compared.map((one) => ({ name: data.variants[one], side: changes[one].get(place)?.side }))];
    const kl = other < 0 ? changes[variant].get(place).kl : null;
    const numbers = [
      item[8] === null ? null : `baseline's margin ${percent(item[8])}`,
      kl === null ? null : `KL ${kl} nats`,
    ].filter(Boolean).join(" · ");
    const where = [data.tasks[item[1]], item[2] === null ? null : data.categories[item[2]], item[0]].filter((part) => part !== null).join(" · ");
    const others = data.variants.filter((_, one) => !compared.includes(one) && changes[one].has(place));
    const examples = data.prefixes[item[3]];
    const named = data.variants[variant] + (other < 0 ? "" : ` against ${data.variants[other]}`);
    const as = item[5] ? "answers as the baseline does" : "is right or wrong as the baseline is";
    const kept = models.filter(({ side }) => !side).map(({ name }) => `${name} ${as}. `);
    return element("article", {},
      element("h3", {}, named, " ", element("span", { class: style }, text), element("small", {}, numbers)),
      element("p", { class: "note" }, where),
      examples ? element("details", {}, element("summary", {}, "The prompt begins with"), element("pre", {}, examples)) : null,
      element("div", { class: "item" }, element("pre", {}, item[4]), item[5] ? options(item, models) : texts(item, models)),
      element("p", { class: "note" }, ...kept, others.length ? `Also changed by ${listed(others)}.` : "No other variant changed it."));
  }

  /** Make the values of the heat map links to the changed answers that they count. */
  function linkCells() {
    const key = (task, category) => JSON.stringify([task, category ?? null]);
    const counts = changes.map((own) => {
      const parts = new Map();
      for (const [item, { kind }] of own)
        if (kind !== "w2w") {
          const task = data.tasks[data.items[item][1]];
          for (const part of new Set([key(task), key(task, data.categories[data.items[item][2]])])) parts.set(part, (parts.get(part) ?? 0) + 1);
        }
      return parts;
    });
    const [head, ...rows] = document.querySelectorAll('[aria-labelledby="categories"] tr');
    const names = [...head.cells].map((cell) => cell.textContent);
    const places = names.map((name, i) => (i > 1 ? data.variants.indexOf(name) : -1));
    for (const row of rows) {
      const part = Object.fromEntries(new URLSearchParams(row.cells[0].dataset.value));
      [...row.cells].forEach((cell, i) => {
        const n = counts[places[i]]?.get(key(part.task, part.category));
        if (!n) return;
        const link = { href: fragmentOf({ variant: names[i], ...part, change: "flip" }), title: counted(n, "changed answer", "changed answers") };
        cell.firstElementChild.replaceChildren(element("a", link, ...cell.firstElementChild.childNodes));
      });
    }
  }

  const changed = () => {
    select();
    note(fragmentOf(state()));
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", settled(changed, 200));
  byId("flip-more").addEventListener("click", more);
  addEventListener("hashchange", () => restore(location.hash) && select());
  // Before the page goes there: a sandboxed address does not change.
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#flips?"]');
    if (link && restore(link.getAttribute("href"))) select();
  }, true);
  linkCells();
  const asked = restore(location.hash);
  select();
  if (asked) byId("flips").scrollIntoView();
};
