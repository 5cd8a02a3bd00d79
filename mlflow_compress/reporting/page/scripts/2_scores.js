// The scoreboard: sorts and filters its rows. Figures draw what it shows.
const Scores = (() => {
  const table = document.querySelector("table.scores");
  const rows = [...table.tBodies[0].rows].filter((row) => row.querySelector(".method")); // the baseline stays on top
  const heads = [...table.tHead.rows[0].cells];
  const listeners = [];
  let sorted = { column: null, descending: false };

  const value = (row, column) => row.cells[column].dataset.value;

  function sort(column, descending) {
    sorted = { column, descending };
    const order = [...rows].sort((a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined); // a missing value is last
      const difference = column === 0 ? x.localeCompare(y, "en", { numeric: true }) : x - y;
      return descending ? -difference : difference;
    });
    table.tBodies[0].append(...order);
    heads.forEach((head, i) =>
      i === column ? head.setAttribute("aria-sort", descending ? "descending" : "ascending") : head.removeAttribute("aria-sort"),
    );
    byId("score-sort").value = column;
  }

  function filter() {
    const wanted = byId("score-filter").value.trim().toLowerCase();
    const front = byId("score-front").checked;
    for (const row of rows) {
      const named = `${value(row, 0)} ${row.querySelector(".method").textContent}`.toLowerCase().includes(wanted);
      row.hidden = !named || (front && !row.querySelector(".star"));
    }
    byId("score-count").textContent = `${visible().length} of ${counted(rows.length, "variant", "variants")}`;
    listeners.forEach((listener) => listener());
  }

  const visible = () => rows.filter((row) => !row.hidden).map((row) => value(row, 0));

  heads.forEach((head, column) => {
    const button = element("button", { type: "button" }, head.textContent);
    head.replaceChildren(button);
    const first = head.dataset.direction === "higher"; // the best on top
    button.addEventListener("click", () => sort(column, sorted.column === column ? !sorted.descending : first));
  });
  fill(byId("score-sort"), [["", "closest to the baseline"], ...heads.map((head, i) => [i, head.textContent])]);
  byId("score-sort").addEventListener("change", (event) => {
    if (event.target.value === "") {
      table.tBodies[0].append(...rows);
      heads.forEach((head) => head.removeAttribute("aria-sort"));
    } else sort(+event.target.value, heads[+event.target.value].dataset.direction === "higher");
  });
  byId("score-filter").addEventListener("input", settled(filter));
  byId("score-front").addEventListener("change", filter);
  const strong = table.querySelector("tr.strong");
  const choice = strong && value(strong, 0); // null where the policy chooses none
  return { visible, filter, choice, first: choice ?? value(rows[0], 0), whenFiltered: (listener) => listeners.push(listener) };
})();
