// Tables of all rows: sorted by a click on a column's name, filtered by chosen values and a word.

// "1,234 ± 0.5 %" and "1.45x" sort as numbers, other cells as words, and empty ones come last.
function sortValue(cell) {
  const text = cell.textContent.trim();
  const number = /^-?[\d,.]+(e[-+]?\d+)?/.exec(text);
  return cell.classList.contains("left") ? text.toLowerCase() : number ? Number(number[0].replace(/,/g, "")) : "";
}

function sortBy(header) {
  const table = header.closest("table"), body = table.tBodies[0], column = header.cellIndex;
  const sign = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  const rows = Array.from(body.rows, row => [sortValue(row.cells[column]), row]);
  rows.sort(([a], [b]) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  });
  body.append(...rows.map(([, row]) => row));
}

const plain = text => text.toLowerCase().replace(/[\s_.-]/g, "");

// Of one table, or of all tables of a page, whose empty sections are hidden.
function filterRows(filters) {
  const one = document.getElementById(filters.dataset.table);
  const tables = one ? [one] : Array.from(document.querySelectorAll("article table"));
  const chosen = Array.from(filters.querySelectorAll("select")).filter(select => select.value);
  const word = plain(filters.querySelector("input").value);
  let shown = 0, every = 0;
  for (const table of tables) {
    const rows = Array.from(table.tBodies[0].rows);
    for (const row of rows)
      row.hidden = !plain((one ? row : row.cells[0]).textContent).includes(word)
        || chosen.some(select => row.cells[Number(select.dataset.column)].textContent !== select.value);
    const left = rows.filter(row => !row.hidden).length;
    if (!one) table.closest("section").hidden = !left;
    shown += left;
    every += rows.length;
  }
  filters.querySelector("output").textContent = `${shown} of ${every} rows`;
}

document.addEventListener("DOMContentLoaded", () => {
  for (const button of document.querySelectorAll(".scroll th button"))
    button.addEventListener("click", () => sortBy(button.parentElement));
  for (const filters of document.querySelectorAll(".filters"))
    filters.addEventListener("input", () => filterRows(filters));
});
