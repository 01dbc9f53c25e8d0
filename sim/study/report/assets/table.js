// The table of runs: sorting, filters, and the shown rows as CSV.

const MOST_ROWS = 500;

class RunTable {
  constructor(section, { columns, rows }, onDetails) {
    this.columns = columns;
    this.rows = rows;
    this.onDetails = onDetails;
    this.part = (name) => section.querySelector(`[data-part="${name}"]`);
    this.place = new Map(columns.map((column, i) => [column.name, i]));
    this.sort = { column: null, down: false };
    this.facets = [];
    this.more = false;
    this.makeFacets();
    this.part("search").addEventListener("input", () => this.draw());
    this.part("all-columns").addEventListener("change", () => this.draw());
    this.part("clear").addEventListener("click", () => this.clear());
    this.part("more").addEventListener("click", () => {
      this.more = true;
      this.draw();
    });
    this.draw();
  }

  makeFacets() {
    this.columns.forEach((column, i) => {
      if (!column.facet) return;
      const choice = element("select");
      choice.append(new Option("all", ""));
      const values = [...new Set(this.rows.map((row) => row[i]))].sort(compare);
      values.forEach((value, at) => choice.append(new Option(value === null ? "-" : String(value), String(at))));
      choice.addEventListener("change", () => this.draw());
      const label = element("label", {}, `${column.head} `);
      label.append(choice);
      this.part("facets").append(label);
      this.facets.push({ column: i, choice, values });
    });
  }

  clear() {
    this.part("search").value = "";
    this.facets.forEach(({ choice }) => (choice.value = ""));
    this.draw();
  }

  selected() {
    const words = this.part("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const texts = this.columns.flatMap((column, i) => (column.number || column.name === "command" ? [] : [i]));
    const wanted = this.facets.filter(({ choice }) => choice.value !== "");
    const rows = this.rows.filter(
      (row) =>
        wanted.every(({ column, choice, values }) => row[column] === values[Number(choice.value)]) &&
        words.every((word) => texts.some((i) => String(row[i] ?? "-").toLowerCase().includes(word))),
    );
    const { column, down } = this.sort;
    if (column !== null) rows.sort((a, b) => (missing(a[column], b[column]) ?? compare(a[column], b[column]) * (down ? -1 : 1)));
    return rows;
  }

  draw() {
    const all = this.part("all-columns").checked;
    const shown = this.columns.flatMap((column, i) => ((all ? !column.change_of : column.main) ? [i] : []));
    const rows = this.selected();
    const page = this.more ? rows : rows.slice(0, MOST_ROWS);
    this.part("head").replaceChildren(this.head(shown));
    this.part("body").replaceChildren(...page.map((row) => this.line(row, shown)));
    this.part("more").hidden = page.length === rows.length;
    this.part("status").textContent =
      `${whole(rows.length)} of ${whole(this.rows.length)} runs` + (page.length < rows.length ? `, the first ${MOST_ROWS} shown` : "");
    this.part("csv").href = `data:text/csv;charset=utf-8,${encodeURIComponent(this.csv(rows))}`;
  }

  head(shown) {
    const line = element("tr");
    for (const i of shown) {
      const column = this.columns[i];
      const mine = this.sort.column === i;
      const cell = element("th", { scope: "col", class: column.number ? "number" : "" });
      if (mine) cell.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
      const button = element("button", { type: "button", title: column.title });
      button.append(column.head, column.unit ? element("span", { class: "unit" }, ` (${column.unit})`) : "");
      button.append(element("span", { class: "arrow", "aria-hidden": "true" }, mine ? (this.sort.down ? " ▼" : " ▲") : ""));
      button.addEventListener("click", () => {
        this.sort = { column: i, down: mine && !this.sort.down };
        this.draw();
        this.part("head").querySelectorAll("button")[shown.indexOf(i)].focus();
      });
      cell.append(button);
      line.append(cell);
    }
    line.append(element("th", { scope: "col" }, "run"));
    return line;
  }

  line(row, shown) {
    const line = element("tr");
    shown.forEach((i, at) => {
      const column = this.columns[i];
      const cell = element(at ? "td" : "th", at ? { class: column.number ? "number" : "" } : { scope: "row" });
      cell.append(shownValue(row[i], column));
      const change = column.change && row[this.place.get(column.change)];
      if (typeof change === "number" && change !== 0) {
        const share = 100 * change;
        cell.append(element("span", { class: "change" }, ` ${share < 0 ? "−" : "+"}${Math.abs(share).toFixed(1)} %`));
      }
      line.append(cell);
    });
    const cell = element("td");
    const hash = row[this.place.get("config_hash")];
    const button = element("button", { type: "button", class: "plain" }, "show");
    button.setAttribute("aria-label", `show the command of run ${hash}`);
    button.addEventListener("click", () => this.onDetails(row, this.place, button));
    cell.append(button);
    line.append(cell);
    return line;
  }

  csv(rows) {
    const quoted = (value) => {
      const text = value === null ? "" : String(value);
      return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const kept = this.columns.flatMap((column, i) => (column.name === "command" ? [] : [i]));
    const lines = [kept.map((i) => this.columns[i].name), ...rows.map((row) => kept.map((i) => row[i]))];
    return lines.map((line) => line.map(quoted).join(",")).join("\r\n") + "\r\n";
  }
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true });
}

// Rows without a value stay at the end in either direction.
function missing(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  return undefined;
}

function shownValue(value, column) {
  if (value === null) return "-";
  if (typeof value !== "number") return String(value);
  return value.toLocaleString("en", { minimumFractionDigits: column.decimals, maximumFractionDigits: column.decimals });
}
