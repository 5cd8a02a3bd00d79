// The figures, drawn with Observable Plot as SVG. Colours are the page's variables, so that they follow dark mode and print.
const Figures = (data, alike) => {
  const MOST_NAMES = 16; // more names would cover each other
  const MOST_ROWS = 40;
  const MOST_TIES = 8; // pairs that are written out
  const columns = new Map(data.columns.map((column) => [column.key, column]));
  const label = (column) => column.label + (column.suffix ? ` (${column.suffix})` : "");

  /** Return the rows that the scoreboard shows and that have both values, scaled to the column's unit. */
  function points(x, y) {
    const shown = new Set(Scores.visible());
    const scaled = (row, key) => {
      const cell = row.cells[key];
      return cell && cell.map((value) => (value === null ? null : value * columns.get(key).factor));
    };
    return data.rows
      .filter((row) => shown.has(row.name) && row.cells[x] && row.cells[y])
      .map((row) => ({ name: row.name, x: scaled(row, x), y: scaled(row, y) }));
  }

  /** Return the points that no other one beats in both values; none where a value has no better side. */
  function front(found, x, y) {
    const sign = (key) => ({ lower: 1, higher: -1 })[columns.get(key).direction] ?? null;
    const [sx, sy] = [sign(x), sign(y)];
    if (sx === null || sy === null) return [];
    const beats = (a, b) =>
      sx * a.x[0] <= sx * b.x[0] && sy * a.y[0] <= sy * b.y[0] && (a.x[0] !== b.x[0] || a.y[0] !== b.y[0]);
    return found.filter((b) => !found.some((a) => beats(a, b))).sort((a, b) => a.x[0] - b.x[0]);
  }

  /** Return the scale of an axis: its ends hold the intervals; a logarithm needs values above 0. */
  function scale(values, logarithmic) {
    const all = values.flat().filter((value) => value !== null && (!logarithmic || value > 0));
    const [low, high] = [Math.min(...all), Math.max(...all)];
    if (logarithmic) return { type: "log", domain: [low / 1.3, high * 1.3], low: low / 1.3 };
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return { type: "linear", domain: [low - room, high + room], low: low - room };
  }

  /** Return whether a logarithm shows more: over 4 decades, equal models would leave no room for the others. */
  function spread(values) {
    const all = values.map((value) => value[0]);
    const ratio = Math.max(...all) / Math.min(...all);
    return Math.min(...all) > 0 && ratio > 20 && ratio < 1e4;
  }

  /** Return how far to shift each name, in pixels, so that it covers no other name and no point. */
  function shifts(names, points) {
    const placed = points.map(([x, y]) => ({ left: x - 6, right: x + 6, y }));
    return names.map((name) => {
      let y = name.y;
      const covers = (other) => Math.abs(other.y - y) < 14 && name.left < other.right && other.left < name.right;
      for (let other; (other = placed.find(covers)); ) y = other.y + 15; // more than `covers` asks for, so that this ends
      placed.push({ ...name, y });
      return y - name.y;
    });
  }

  function place(id, svg, described) {
    svg.querySelector("style")?.remove(); // the policy forbids it; page.css has its rules
    svg.querySelectorAll("[aria-label]").forEach((part) => part.removeAttribute("aria-label")); // one image, one label
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", described);
    byId(id).replaceChildren(svg);
  }

  const ticks = (axis) => (axis.type === "log" ? { tickFormat: "~g", ticks: 5 } : { ticks: 6 });

  const MARGINS = { marginLeft: 60, marginRight: 20, marginTop: 30, marginBottom: 42 };

  /** Return the marks that write some points' names beside them, where no other name and no point stands. */
  function nameMarks(found, named, across, up, width, height) {
    const { marginLeft, marginRight, marginTop, marginBottom } = MARGINS;
    const part = (axis, value) => {
      const [low, high, it] = [...axis.domain, value].map({ log: Math.log, sqrt: Math.sqrt }[axis.type] ?? Number);
      return (it - low) / (high - low);
    };
    const at = (p) => [
      marginLeft + part(across, p.x[0]) * (width - marginLeft - marginRight),
      height - marginBottom - part(up, p.y[0]) * (height - marginTop - marginBottom),
    ];
    const labels = named.map((p) => {
      const [x, y] = at(p);
      const size = 6.6 * p.name.length;
      const toLeft = x + 8 + size > width;
      return { p, toLeft, y: y - 9, left: toLeft ? x - 8 - size : x + 8, right: toLeft ? x - 8 : x + 8 + size };
    }).sort((a, b) => a.y - b.y);
    const shifted = shifts(labels, found.map(at));
    return labels.map(({ p, toLeft }, i) => Libraries.text([p],
      { x: p.x[0], y: p.y[0], text: "name", dx: toLeft ? -8 : 8, dy: shifted[i] - 9, textAnchor: toLeft ? "end" : "start",
        fill: "var(--ink)", stroke: "var(--page)", strokeWidth: 4 }));
  }

  /** Draw the answers that each variant broke against those that it repaired. */
  function direction() {
    const caption = byId("direction-ties");
    const harm = new Map(data.rows.map((row) => [row.name, row.harm]));
    // Half of the flips plus and minus the difference of accuracy; more difference than flips needs more flips.
    const at = (flips, change) => [-1, 1].map((sign) => (Math.max(flips, Math.abs(change)) + sign * change) / 2);
    const steps = [...Array(41).keys()].map((i) => i / 40);
    const found = points("distance/flips_pct", "quality/accuracy_delta").filter((p) => harm.get(p.name)).map((p) => {
      const [flips, [change, low, high]] = [p.x[0], p.y];
      const [lost, gained] = at(flips, change);
      const ends = [...steps.map((t) => low + t * (high - low)), ...[-flips, flips].filter((end) => low < end && end < high)];
      return { name: p.name, harm: harm.get(p.name), x: [lost], y: [gained], change: p.y, line: ends.sort((a, b) => a - b).map((end) => at(flips, end)) };
    });
    caption.textContent = "";
    if (!found.length) return byId("direction").replaceChildren();
    const margin = found[0].harm.margin;
    const most = 1.1 * Math.max(margin, ...found.flatMap((p) => p.line.flat()));
    const axis = { type: "sqrt", domain: [0, most] };
    const width = Math.max(300, byId("direction").clientWidth);
    const height = Math.max(300, Math.min(460, width * 0.7));
    const byName = new Map(found.map((p) => [p.name, p]));
    const ties = data.ties.filter((pair) => pair.every((name) => byName.has(name)));
    const tied = (name) => ties.filter((pair) => pair.includes(name)).map(([a, b]) => (a === name ? b : a));
    const told = ties.length <= MOST_TIES ? ties : ties.filter((pair) => pair.includes(Scores.first));
    const named = found.length <= MOST_NAMES ? found : found.filter((p) => p.name === Scores.first);
    const dots = (word, look) => Libraries.dot(found.filter((p) => p.harm.word === word), { x: (p) => p.x[0], y: (p) => p.y[0], r: 5, strokeWidth: 1.5, ...look });
    const title = (p) => [
      p.name,
      `right → wrong ${p.x[0].toPrecision(3)} %, wrong → right ${p.y[0].toPrecision(3)} %`,
      "accuracy {0} points [{1}, {2}]: ".replace(/\{(\d)\}/g, (_, i) => p.change[i].toFixed(2)) + p.harm.text,
      tied(p.name).length ? `tied with ${listed(tied(p.name))}` : null,
    ].filter(Boolean).join("\n");
    place("direction", Libraries.plot({
      width, height, ...MARGINS, className: "figure", style: { fontSize: "12px" },
      x: { ...axis, label: "Right → wrong (%) →", labelAnchor: "right", ticks: 6 },
      y: { ...axis, label: "↑ Wrong → right (%)", ticks: 6 },
      marks: [
        Libraries.line([[0, 0], [most, most]], { stroke: "var(--ink)" }),
        Libraries.line(steps.map((t) => [margin + t * t * (most - margin), t * t * (most - margin)]), { stroke: "var(--worse)", strokeDasharray: "6 4" }),
        Libraries.line(found.flatMap((p) => p.line.map(([x, y]) => ({ x, y, name: p.name }))), { x: "x", y: "y", z: "name", stroke: "var(--muted)" }),
        Libraries.link(told, { x1: ([a]) => byName.get(a).x[0], y1: ([a]) => byName.get(a).y[0], x2: ([, b]) => byName.get(b).x[0], y2: ([, b]) => byName.get(b).y[0],
          stroke: "var(--accent)", strokeWidth: 2, strokeDasharray: "1 4", strokeLinecap: "round" }),
        dots("no worse", { fill: "var(--accent)", stroke: "var(--accent)" }),
        dots("open", { fill: "var(--page)", stroke: "var(--accent)" }),
        dots("worse", { fill: "var(--worse)", stroke: "var(--worse)", symbol: "triangle" }),
        Libraries.dot(found.filter((p) => p.name === Scores.choice), { x: (p) => p.x[0], y: (p) => p.y[0], r: 9, stroke: "var(--ink)", strokeWidth: 1.5 }),
        ...nameMarks(found, named, axis, axis, width, height),
        Libraries.tip(found, Libraries.pointer({ x: (p) => p.x[0], y: (p) => p.y[0], title, fill: "var(--page)", stroke: "var(--line)" })),
      ],
    }), `Answers broken against answers repaired of ${counted(found.length, "variant", "variants")}; the table below has the numbers.`);
    caption.textContent = [
      byName.has(Scores.choice) ? "Ringed: the choice." : "",
      ties.length ? `Dotted: ties, which neither KL nor right answers tell apart: ${ties === told ? ties.map((pair) => pair.join(" and ")).join("; ")
        : `${Scores.first} and ${listed(tied(Scores.first)) || "none"}, of ${ties.length} pairs`}.` : "",
      named.length < found.length ? "Not all are named; point at them." : "",
    ].filter(Boolean).join(" ");
  }

  /** Draw the models on the principal components of their similarities; the first two are the baseline's samples. */
  function alikeMap() {
    const found = alike.points.map((p, i) => ({ ...p, x: [p.x], y: [p.y], own: i < 2 }));
    const width = Math.max(300, byId("alike-map").clientWidth);
    const height = Math.max(300, Math.min(440, width * 0.5));
    const [across, up] = ["x", "y"].map((side) => scale(found.map((p) => p[side]), false));
    const share = (i) => `Component ${i + 1}: ${(100 * alike.shares[i]).toFixed(1)} % of the variance`;
    const title = (p) => `${p.name}\nsimilarity to the baseline: ${p.alike.toFixed(4)}`;
    place("alike-map", Libraries.plot({
      width, height, ...MARGINS, className: "figure", style: { fontSize: "12px" },
      x: { domain: across.domain, label: share(0) + " →", labelAnchor: "right", ...ticks(across) },
      y: { domain: up.domain, label: "↑ " + share(1), grid: true, ...ticks(up) },
      marks: [
        Libraries.dot(found, { x: (p) => p.x[0], y: (p) => p.y[0], r: 5, stroke: "var(--accent)", strokeWidth: 1.5,
          fill: (p) => (p.own ? "var(--page)" : "var(--accent)") }),
        ...nameMarks(found, found.length <= MOST_NAMES ? found : found.slice(0, 2), across, up, width, height),
        Libraries.tip(found, Libraries.pointer({ x: (p) => p.x[0], y: (p) => p.y[0], title, fill: "var(--page)", stroke: "var(--line)" })),
      ],
    }), `${counted(found.length, "model", "models")} as points, by whom their answers resemble; the table above has the similarities.`);
  }

  function scatter() {
    const [x, y] = ["x", "y"].map((side) => byId(`scatter-${side}`).value);
    const found = points(x, y);
    const caption = byId("scatter-caption");
    const logarithmic = (side) => byId(`scatter-log-${side}`).checked;
    const possible = found.filter((p) => ["x", "y"].every((side) => !logarithmic(side) || p[side][0] > 0));
    if (!possible.length) {
      byId("scatter").replaceChildren();
      caption.textContent = found.length
        ? "No variant has two values above 0, which logarithmic axes need."
        : "No variant of the scoreboard's selection has both numbers.";
      return;
    }
    const [across, up] = ["x", "y"].map((side) => scale(possible.map((p) => p[side]), logarithmic(side)));
    const best = front(possible, x, y);
    const width = Math.max(300, byId("scatter").clientWidth);
    const named = [possible, best].find((some) => some.length <= MOST_NAMES) ?? [];
    const bounded = (side) => possible.filter((p) => p[side][1] !== null && p[side][2] !== null);
    const [cx, cy] = [columns.get(x), columns.get(y)];
    const title = (p) => `${p.name}\n${label(cx)}: ${p.x[0].toPrecision(4)}\n${label(cy)}: ${p.y[0].toPrecision(4)}`;
    const height = Math.max(300, Math.min(460, width * 0.6));
    const names = nameMarks(possible, named, across, up, width, height);
    place("scatter", Libraries.plot({
      width, height, ...MARGINS, className: "figure", style: { fontSize: "12px" },
      x: { type: across.type, domain: across.domain, label: label(cx) + " →", labelAnchor: "right", ...ticks(across) },
      y: { type: up.type, domain: up.domain, label: "↑ " + label(cy), grid: true, ...ticks(up) },
      marks: [
        Libraries.line(best, { x: (p) => p.x[0], y: (p) => p.y[0], stroke: "var(--accent)", strokeDasharray: "4 4" }),
        Libraries.ruleX(bounded("y"), { x: (p) => p.x[0], y1: (p) => Math.max(p.y[1], up.low), y2: (p) => p.y[2], stroke: "var(--muted)" }),
        Libraries.ruleY(bounded("x"), { y: (p) => p.y[0], x1: (p) => Math.max(p.x[1], across.low), x2: (p) => p.x[2], stroke: "var(--muted)" }),
        Libraries.dot(possible, { x: (p) => p.x[0], y: (p) => p.y[0], r: 5, stroke: "var(--accent)", strokeWidth: 1.5,
          fill: (p) => (best.includes(p) ? "var(--accent)" : "var(--page)") }),
        ...names,
        Libraries.tip(possible, Libraries.pointer({ x: (p) => p.x[0], y: (p) => p.y[0], title, fill: "var(--page)", stroke: "var(--line)" })),
      ],
    }), `${cx.label} against ${cy.label} of ${counted(possible.length, "variant", "variants")}; the scoreboard has the numbers.`);
    const left = found.length - possible.length;
    caption.textContent = [
      best.length ? "Filled and joined: the Pareto front, which no other variant beats in both." : "These numbers have no better side, so there is no Pareto front.",
      `Lines are ${100 * data.level} % intervals.`,
      left ? `${counted(left, "variant has", "variants have")} a value of 0 or below, which a logarithmic axis cannot show.` : "",
      named.length < possible.length ? "Not all are named; point at them." : "",
    ].filter(Boolean).join(" ");
  }

  function apart() {
    const metric = byId("apart-metric").value;
    const column = columns.get(metric);
    const all = points(metric, metric).sort((a, b) => a.x[0] - b.x[0]);
    const found = all.slice(0, MOST_ROWS);
    if (!found.length) return byId("apart-plot").replaceChildren();
    const rank = new Map(found.map((p, i) => [p.name, i]));
    const groups = data.groups[metric].map((group) => group.filter((name) => rank.has(name))).filter((group) => group.length > 1);
    byId("apart-left").textContent = [
      groups.length ? "A bar on the right joins the variants that cannot be told apart." : "",
      all.length > found.length ? `The first ${found.length} of ${all.length} are drawn.` : "",
    ].filter(Boolean).join(" ");
    const logarithmic = spread(found.map((p) => p.x));
    const across = scale(found.map((p) => p.x), logarithmic);
    const width = Math.max(300, byId("apart-plot").clientWidth);
    const longest = Math.max(...found.map((p) => p.name.length));
    const narrow = width < 560; // names stand above their lines
    const lanes = lanesOf(groups.map((group) => group.map((name) => rank.get(name))));
    const place_ = (p) => p.name;
    const text = (p) => `${p.x[0].toPrecision(3)}${p.x[1] === null ? "" : ` [${p.x[1].toPrecision(3)}${p.x[2] === null ? " or more]" : `, ${p.x[2].toPrecision(3)}]`}`}`;
    place("apart-plot", Libraries.plot({
      width, height: 58 + found.length * (narrow ? 40 : 26), marginTop: 8, marginBottom: 42, className: "figure", style: { fontSize: "12px" },
      marginLeft: narrow ? 12 : Math.min(300, 14 + 7 * longest), marginRight: 24 + 14 * Math.max(1, ...lanes.map((lane) => lane + 1)),
      x: { type: across.type, domain: across.domain, label: label(column) + " →", labelAnchor: "right", grid: true, ...ticks(across) },
      y: { domain: found.map(place_), label: null, type: "point", padding: 0.6, axis: narrow ? null : "left", tickSize: 0 },
      marks: [
        Libraries.ruleY(found.filter((p) => p.x[1] !== null && p.x[2] !== null), { y: place_, x1: (p) => Math.max(p.x[1], across.low), x2: (p) => p.x[2], stroke: "var(--ink)", strokeWidth: 2 }),
        Libraries.dot(found, { y: place_, x: (p) => p.x[0], r: 4.5, fill: "var(--accent)" }),
        narrow ? Libraries.text(found, { y: place_, text: (p) => `${p.name}  ${text(p)}`, frameAnchor: "left", dy: -14, fill: "var(--ink)" }) : null,
        ...groups.map((group, i) => Libraries.link([group], { x1: across.domain[1], x2: across.domain[1], y1: (g) => g[0],
          y2: (g) => g.at(-1), stroke: "var(--accent)", strokeWidth: 5, strokeLinecap: "round", dx: 14 + 14 * lanes[i] })),
        narrow ? null : Libraries.tip(found, Libraries.pointer({ x: (p) => p.x[0], y: place_, title: (p) => `${p.name}\n${text(p)}`, fill: "var(--page)", stroke: "var(--line)" })),
      ],
    }), `${column.label} of ${counted(found.length, "variant", "variants")} with intervals; ${counted(groups.length, "group", "groups")} cannot be told apart, as the table above lists.`);
  }

  /** Return a lane per bar so that bars which overlap stand beside each other. */
  function lanesOf(bars) {
    const ends = [];
    return bars.map((ranks) => {
      const [low, high] = [Math.min(...ranks), Math.max(...ranks)];
      let lane = ends.findIndex((end) => end < low);
      if (lane < 0) lane = ends.length;
      ends[lane] = high;
      return lane;
    });
  }

  const named = data.columns.map((column) => [column.key, column.label]);
  fill(byId("scatter-x"), named, "size/bytes");
  fill(byId("scatter-y"), named, data.distance);
  fill(byId("apart-metric"), Object.keys(data.groups).filter((key) => columns.has(key)).map((key) => [key, columns.get(key).label]));
  const suggest = (side) => {
    const key = byId(`scatter-${side}`).value;
    const values = data.rows.filter((row) => row.cells[key]).map((row) => row.cells[key]);
    byId(`scatter-log-${side}`).checked = side === "y" && values.length > 0 && spread(values);
  };
  for (const side of ["x", "y"]) {
    byId(`scatter-${side}`).addEventListener("change", () => (suggest(side), scatter()));
    byId(`scatter-log-${side}`).addEventListener("change", scatter);
  }
  suggest("x");
  suggest("y");
  const PRESETS = [["size/bytes", "KL by size"], ["speed/decode_ratio_batch_1", "KL by speed"], ["speed/memory_peak_ratio", "KL by memory"],
    ["reasoning/tokens_per_right_ratio", "KL by tokens to a right answer"]];
  const offered = columns.has(data.distance) ? PRESETS.filter(([key]) => columns.has(key)) : [];
  if (offered.length > 1)
    for (const [key, text] of offered) {
      const button = element("button", { type: "button" }, text);
      button.addEventListener("click", () => {
        byId("scatter-x").value = key;
        byId("scatter-y").value = data.distance;
        suggest("x");
        suggest("y");
        scatter();
      });
      byId("scatter-presets").append(button);
    }
  const metricChosen = byId("apart-metric").options.length > 0;
  const draw = () => (scatter(), byId("direction") && direction(), metricChosen && apart(), alike && alikeMap());
  byId("apart-metric").addEventListener("change", apart);
  Scores.whenFiltered(draw);
  let width = 0;
  new ResizeObserver(settled(() => {
    if (width !== byId("scatter").clientWidth) {
      width = byId("scatter").clientWidth;
      draw();
    }
  }, 60)).observe(byId("scatter"));
  draw();
  width = byId("scatter").clientWidth;
};
