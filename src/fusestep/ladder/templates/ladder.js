"use strict";

// Sort a table by a column, and the other way round at the next press; what has no value comes last either way.
document.querySelectorAll("#figures table").forEach((table) => {
  const titles = [...table.querySelectorAll("thead th")];
  titles.forEach((title, column) => {
    const button = title.querySelector("button");
    // The first column stays while the others scroll, and would hide the title that Shift+Tab goes back to.
    button.addEventListener("focus", () => {
      if (column === 0 || !button.matches(":focus-visible")) return;
      table.parentElement.style.scrollPaddingLeft = `${titles[0].offsetWidth}px`;
      title.scrollIntoView({ block: "nearest", inline: "nearest" });
    });
    button.addEventListener("click", () => {
      const down = title.getAttribute("aria-sort") === "ascending";
      titles.forEach((other) => other.setAttribute("aria-sort", "none"));
      title.setAttribute("aria-sort", down ? "descending" : "ascending");
      const isNumber = title.classList.contains("number");
      const value = (row) => row.cells[column].dataset.value;
      const order = (a, b) => (isNumber ? a - b : a.localeCompare(b));
      const compare = (a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        return down ? order(y, x) : order(x, y);
      };
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort(compare));
    });
  });
});

// A press on a name in a legend takes its line away, or brings it back.
document.querySelectorAll(".legend button").forEach((button) => {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    button
      .closest("figure")
      .querySelectorAll(".line")
      .forEach((line) => {
        if (line.dataset.rung === button.dataset.rung) line.classList.toggle("hidden", !shown);
      });
  });
});
