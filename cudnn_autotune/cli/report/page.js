"use strict";
// The page reads without this: it only sorts and filters the overview.
(() => {
  const table = document.querySelector(".sortable");
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const input = document.getElementById("filter");
  const shown = document.getElementById("shown");

  const apply = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const text = row.dataset.text.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      document.getElementById(row.dataset.section).closest("details").hidden = row.hidden;
      count += row.hidden ? 0 : 1;
    }
    shown.textContent = words.length ? `${count} of ${rows.length}` : "";
  };

  const value = (row, index) => {
    const text = row.cells[index].dataset.sort;
    const number = Number(text === "inf" ? Infinity : text);
    return text !== "" && !Number.isNaN(number) ? number : text;
  };

  const sort = (header, index) => {
    const falls = header.getAttribute("aria-sort") === "ascending";
    for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", falls ? "descending" : "ascending");
    const compare = (a, b) => {
      const [x, y] = [value(a, index), value(b, index)];
      if (x === y) return 0;
      if (x === "" || y === "") return x === "" ? 1 : -1;
      const order = x < y ? -1 : 1;
      return falls ? -order : order;
    };
    body.append(...rows.slice().sort(compare));
  };

  Array.from(table.tHead.rows[0].cells).forEach((header, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = header.textContent;
    button.addEventListener("click", () => sort(header, index));
    header.replaceChildren(button);
  });
  input.closest("p").hidden = false;
  input.addEventListener("input", apply);
  // A link into a section that is closed opens it.
  const open = () => {
    const target = document.getElementById(location.hash.slice(1));
    const section = target && target.closest("details");
    if (section) {
      section.open = true;
      section.scrollIntoView();
    }
  };
  addEventListener("hashchange", open);
  open();
})();
