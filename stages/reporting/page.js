// Sorts and filters every table of the page. Without it the page is the same page, in the order it was written in.
"use strict";
(() => {
  const FEW = 5; // rows; a shorter table needs no filter
  const NUMBER = /^[+-]?(?:\d[\d,]*)?\.?\d+(?:e[+-]?\d+)?/i;
  const compared = new Intl.Collator("en", { numeric: true }).compare;
  const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

  const made = (name, properties) => Object.assign(document.createElement(name), properties);

  // What a cell is sorted by: the value of its <data>, else the number that its text begins with.
  function numberOf(cell) {
    const data = cell.querySelector("data");
    const found = NUMBER.exec((data ? data.value : cell.textContent.trim()).replace("−", "-"));
    return found ? parseFloat(found[0].replaceAll(",", "")) : null;
  }

  function keysOf(rows, column) {
    const cells = rows.map((row) => row.cells[column]);
    const texts = cells.map((cell) => cell.textContent.trim());
    const numbers = cells.map(numberOf);
    const numeric = cells.some((cell) => cell.querySelector("data"))
      || texts.every((text, at) => numbers[at] !== null || text === "" || text === "–");
    return new Map(rows.map((row, at) => [row, numeric ? numbers[at] : texts[at]]));
  }

  // Cells without a value come last, whichever way the others are sorted.
  function order(keys, turn) {
    return (a, b) => {
      const [first, second] = [keys.get(a), keys.get(b)];
      if (first === null || second === null) return (first === null) - (second === null);
      return turn * (typeof first === "number" ? first - second : compared(first, second));
    };
  }

  function sortable(table, rows) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = made("button", { type: "button", textContent: head.textContent || "value" });
      head.replaceChildren(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const next = NEXT[head.getAttribute("aria-sort")];
        heads.forEach((other) => other.setAttribute("aria-sort", other === head ? next : "none"));
        const sorted = next === "none" ? rows
          : [...rows].sort(order(keysOf(rows, column), next === "ascending" ? 1 : -1));
        table.tBodies[0].append(...sorted);
      });
    });
  }

  function filterable(table, rows, before) {
    const texts = rows.map((row) => row.textContent.toLowerCase());
    const section = table.closest("section");
    const ariaLabel = section ? `filter rows: ${section.querySelector("h2").textContent}` : "filter rows";
    const field = made("input", { type: "search", placeholder: "filter rows", ariaLabel });
    const count = made("output", { textContent: `${rows.length} rows` });
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/);
      rows.forEach((row, at) => { row.hidden = !words.every((word) => texts[at].includes(word)); });
      const shown = rows.filter((row) => !row.hidden).length;
      count.textContent = shown === rows.length ? `${shown} rows` : `${shown} of ${rows.length} rows`;
    });
    const tools = made("div", { className: "tools" });
    tools.append(field, count);
    before.before(tools);
  }

  for (const table of document.querySelectorAll("table")) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length > 1) sortable(table, rows);
    if (rows.length >= FEW) filterable(table, rows, table.parentElement);
  }
})();
