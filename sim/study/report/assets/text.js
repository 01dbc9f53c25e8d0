// Elements and numbers.

function element(tag, attributes = {}, text = "") {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== "" || name === "hidden") made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

function whole(number) {
  return Math.round(number).toLocaleString("en");
}

function percent(part, total) {
  return total ? `${((100 * part) / total).toFixed(1)} %` : "-";
}
