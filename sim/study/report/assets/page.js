// Puts the page together: theme, colours, table, block maps.

const THEMES = ["auto", "light", "dark"];


function mapColours(blocks) {
  const style = getComputedStyle(document.documentElement);
  const named = (name) => style.getPropertyValue(name).trim();
  return {
    ground: colourNumber(named("--panel")),
    free: colourNumber(named("--free")),
    live: colourNumber(blocks.live),
    dead: colourNumber(blocks.dead),
    tail: colourNumber(blocks.tail),
    destination: colourNumber(blocks.destination),
    source: colourNumber(blocks.source),
    ramp: blocks.ramp.map(colourNumber),
    ink: named("--ink"),
    quiet: named("--quiet"),
    liveText: named("--live-line"),
    deadText: blocks.dead,
    deadWash: `${blocks.dead}40`,
    sourceText: named("--source-line"),
    destinationText: blocks.destination,
  };
}

// Small pictures of what the map's cells look like, drawn by what draws the map.
function drawLegend(section, colours) {
  const pictures = {
    free: (painter, s) => painter.fill(0, 0, s, s, colours.free),
    live: (painter, s) => painter.fill(0, 0, s, s, colours.live),
    dead: (painter, s) => painter.fill(0, 0, s, s, colours.dead, PATTERNS.hatched),
    tail: (painter, s) => painter.fill(0, 0, s, s, colours.tail, PATTERNS.dotted),
    destination: (painter, s) => painter.fill(0, 0, s, s, colours.destination),
    left: (painter, s) => painter.fill(0, 0, s, s, colours.source),
  };
  const rings = { from: [colours.sourceText, [4, 3]], to: [colours.destinationText, []], owner: [colours.ink, []] };
  section.querySelectorAll("canvas[data-picture]").forEach((canvas) => {
    const name = canvas.dataset.picture;
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    const painter = new Painter(image, colours);
    painter.fill(0, 0, canvas.width, canvas.height, colours.ground);
    if (name in pictures) pictures[name](painter, canvas.width);
    else if (name.startsWith("ramp")) painter.fill(0, 0, canvas.width, canvas.width, colours.ramp[Number(name.slice(4))]);
    else painter.fill(3, 3, canvas.width - 6, canvas.width - 6, colours.free);
    context.putImageData(image, 0, 0);
    if (name in rings) {
      [context.strokeStyle] = rings[name];
      context.setLineDash(rings[name][1]);
      context.lineWidth = name === "owner" ? 1.5 : 2.5;
      context.strokeRect(2, 2, canvas.width - 4, canvas.width - 4);
    }
  });
}

function showDetails(row, place, button) {
  const dialog = document.querySelector("#details");
  dialog.querySelector("h2").textContent = `Run ${row[place.get("config_hash")]}`;
  dialog.querySelector("pre").textContent = row[place.get("command")];
  dialog.addEventListener("close", () => button.focus(), { once: true });
  dialog.showModal();
}

async function start() {
  const data = JSON.parse(document.querySelector("#data").textContent);
  const redraw = [];
  const theme = document.querySelector("#theme");
  const setTheme = (name) => {
    document.documentElement.dataset.theme = name;
    theme.textContent = `Theme: ${name}`;
    redraw.forEach((draw) => draw());
  };
  theme.addEventListener("click", () => {
    setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
  });
  setTheme("auto");
  document.querySelector("#details button").addEventListener("click", () => document.querySelector("#details").close());

  const table = new RunTable(document.querySelector("#runs"), data.table, showDetails);
  let player = null;
  if (data.maps.length) {
    const section = document.querySelector("#map");
    let colours = mapColours(data.colours);
    player = new Player(section, data.maps, () => colours);
    const again = () => {
      colours = mapColours(data.colours);
      drawLegend(section, colours);
      if (player.shown) player.seek(player.time);
    };
    redraw.push(again);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    drawLegend(section, colours);
    await player.start();
  }
  // For the console, and for the tests.
  window.report = { data, table, player };
  document.documentElement.dataset.ready = "";
}

start();
