// One block map: a cell a block, row by row in the order of the pool; only the rows in view are drawn.

const CELL_SIZES = [1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 21, 26, 34, 46];
const BAR_FROM = 8; // from this size on a cell shows parts: live from below, dead above it
const MAP_HEIGHT = 460;

function colourNumber(hex) {
  const value = parseInt(hex.slice(1), 16);
  return (0xff000000 | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

// Live is full, dead is hatched, not yet written is dotted: told apart without colours.
const PATTERNS = {
  full: () => true,
  hatched: (x, y) => (x + y) % 3 !== 0,
  dotted: (x, y) => x % 2 === 0 && y % 2 === 0,
};

class Painter {
  constructor(image, colours) {
    this.width = image.width;
    this.height = image.height;
    this.pixels = new Uint32Array(image.data.buffer);
    this.colours = colours;
  }

  fill(x, y, width, height, colour, pattern) {
    const right = Math.min(x + width, this.width);
    const bottom = Math.min(y + height, this.height);
    for (let row = Math.max(y, 0); row < bottom; row++) {
      const line = row * this.width;
      if (!pattern) this.pixels.fill(colour, line + x, Math.max(line + x, line + right));
      else for (let column = x; column < right; column++) if (pattern(column, row)) this.pixels[line + column] = colour;
    }
  }

  // A block in `size` pixels, of which the last one or two stay empty.
  block(pool, block, x, y, size, slots) {
    const { colours } = this;
    const inner = size < 4 ? size : size < 13 ? size - 1 : size - 2;
    const role = pool.role[block];
    if (role === ROLE.FREE) return this.fill(x, y, inner, inner, colours.free);
    if (role === ROLE.DESTINATION || role === ROLE.LEFT) {
      return this.fill(x, y, inner, inner, role === ROLE.LEFT ? colours.source : colours.destination);
    }
    const total = pool.map.block_size;
    const live = pool.liveSlots[block];
    if (size < BAR_FROM) return this.fill(x, y, inner, inner, colours.ramp[liveClass(live, total)]);
    const written = pool.written[block];
    if (slots > 1) return this.slots(pool, block, x, y, inner, slots);
    const liveTop = inner - Math.round((inner * live) / total);
    const deadTop = inner - Math.round((inner * written) / total);
    this.fill(x, y, inner, deadTop, colours.tail, PATTERNS.dotted);
    this.fill(x, y + deadTop, inner, liveTop - deadTop, colours.dead, PATTERNS.hatched);
    this.fill(x, y + liveTop, inner, inner - liveTop, colours.live);
  }

  slots(pool, block, x, y, inner, columns) {
    const { colours } = this;
    const total = pool.map.block_size;
    const written = pool.written[block];
    const pitch = inner / columns;
    for (let slot = 0; slot < total; slot++) {
      const left = Math.round((slot % columns) * pitch);
      const top = Math.round(Math.floor(slot / columns) * pitch);
      const gap = pitch >= 5 ? 1 : 0;
      const wide = Math.round(((slot % columns) + 1) * pitch) - left - gap;
      const high = Math.round((Math.floor(slot / columns) + 1) * pitch) - top - gap;
      if (pool.slotIsLive(block, slot)) this.fill(x + left, y + top, wide, high, colours.live);
      else if (slot < written) this.fill(x + left, y + top, wide, high, colours.dead, PATTERNS.hatched);
      else this.fill(x + left, y + top, wide, high, colours.tail, PATTERNS.dotted);
    }
  }
}

// 0 if nothing lives, 1 to 4 by quarter, 5 if all does.
function liveClass(live, total) {
  return live === total ? 5 : Math.ceil((4 * live) / total);
}

class MapView {
  constructor(colours, { onInspect }) {
    this.colours = colours;
    this.root = element("figure", { class: "map" });
    this.title = element("figcaption");
    this.facts = element("p", { class: "facts" });
    this.scroller = element("div", { class: "scroller", tabindex: "0" });
    this.spacer = element("div", { class: "spacer" });
    this.canvas = element("canvas", { role: "img" });
    this.tip = element("div", { class: "tip", hidden: "" });
    this.spacer.append(this.canvas);
    this.scroller.append(this.spacer);
    this.root.append(this.title, this.scroller, this.tip, this.facts);
    this.hovered = -1;
    this.onInspect = onInspect;
    this.scroller.addEventListener("scroll", () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => this.hover(null));
    this.canvas.addEventListener("click", () => this.hovered >= 0 && onInspect(this.hovered));
  }

  setPool(pool, label) {
    this.pool = pool;
    this.title.textContent = label;
    this.scroller.setAttribute("aria-label", `Blocks of ${label}; scroll with the arrow keys while this has the focus`);
    this.hovered = -1;
    this.scroller.scrollTop = 0;
  }

  // The largest cells with which the whole pool is in view.
  fittingSize() {
    const blocks = this.pool.map.num_blocks;
    const fits = (size) => Math.ceil(blocks / Math.floor(this.scroller.clientWidth / size)) * size <= MAP_HEIGHT;
    return CELL_SIZES.findLast(fits) ?? CELL_SIZES[0];
  }

  layout(size) {
    const ratio = window.devicePixelRatio || 1;
    const width = this.scroller.clientWidth;
    this.size = size;
    this.columns = Math.max(1, Math.floor(width / size));
    this.rows = Math.ceil(this.pool.map.num_blocks / this.columns);
    const height = Math.min(this.rows * size, MAP_HEIGHT);
    this.scroller.style.height = `${height}px`;
    this.spacer.style.height = `${this.rows * size}px`;
    this.ratio = Math.max(1, Math.round(ratio));
    this.canvas.width = this.columns * size * this.ratio;
    this.canvas.height = height * this.ratio;
    this.canvas.style.width = `${this.columns * size}px`;
    this.canvas.style.height = `${height}px`;
    const side = Math.ceil(Math.sqrt(this.pool.map.block_size));
    this.slotColumns = size >= 3 * side + 1 ? side : 1;
  }

  draw() {
    if (!this.pool || !this.canvas.width) return;
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(this.canvas.width, this.canvas.height);
    const painter = new Painter(image, this.colours());
    painter.fill(0, 0, image.width, image.height, painter.colours.ground);
    const size = this.size * this.ratio;
    const top = Math.round(this.scroller.scrollTop * this.ratio);
    const first = Math.floor(top / size) * this.columns;
    const last = Math.min(this.pool.map.num_blocks, (Math.floor((top + image.height) / size) + 1) * this.columns);
    for (let block = Math.max(1, first); block < last; block++) {
      const { x, y } = this.corner(block, size, top);
      painter.block(this.pool, block, x, y, size, this.slotColumns);
    }
    context.putImageData(image, 0, 0);
    this.outline(context, size, top, first, last);
    this.tell();
  }

  // Scroll so that a block is in view.
  reveal(block) {
    const y = Math.floor(block / this.columns) * this.size;
    const height = this.scroller.clientHeight;
    const top = this.scroller.scrollTop;
    if (y < top || y + this.size > top + height) this.scroller.scrollTop = y - height / 2;
  }

  corner(block, size, top) {
    return { x: (block % this.columns) * size, y: Math.floor(block / this.columns) * size - top };
  }

  // Repacks of this frame, copies in flight, and the blocks of the request under the pointer.
  outline(context, size, top, first, last) {
    const { pool } = this;
    const colours = this.colours();
    const line = Math.max(this.ratio, Math.round(size / 9));
    const ring = (block, colour, dashed) => {
      const { x, y } = this.corner(block, size, top);
      const inner = size - (size < 4 ? 0 : size < 13 ? 1 : 2);
      context.fillStyle = context.strokeStyle = colour;
      if (inner < 5 * line) return context.fillRect(x, y, inner, inner);
      context.lineWidth = line;
      context.setLineDash(dashed ? [2 * line, 1.5 * line] : []);
      context.strokeRect(x + line / 2, y + line / 2, inner - line, inner - line);
    };
    const inView = (block) => block >= first && block < last;
    for (const block of pool.frames.from[pool.at]) if (inView(block)) ring(block, colours.sourceText, true);
    for (const block of pool.frames.to[pool.at]) if (inView(block)) ring(block, colours.destinationText, false);
    for (let block = Math.max(1, first); block < last; block++) {
      if (pool.role[block] === ROLE.SOURCE) ring(block, colours.sourceText, true);
      else if (pool.role[block] === ROLE.TARGET) ring(block, colours.destinationText, false);
    }
    const owner = this.hovered < 0 ? -1 : pool.owner[this.hovered];
    if (owner < 0) return;
    context.setLineDash([]);
    context.strokeStyle = colours.ink;
    context.lineWidth = Math.max(this.ratio, Math.round(size / 12));
    for (let block = Math.max(1, first); block < last; block++) {
      if (pool.owner[block] !== owner) continue;
      const { x, y } = this.corner(block, size, top);
      context.strokeRect(x - 0.5, y - 0.5, size, size);
    }
  }

  tell() {
    const { pool } = this;
    const f = Object.fromEntries(Object.entries(pool.frames).map(([name, values]) => [name, values[pool.at]]));
    const blocks = pool.map.num_blocks - 1;
    const slots = (f.used - f.reserved) * pool.map.block_size;
    const over = f.ideal_blocks ? (f.table_blocks / f.ideal_blocks).toFixed(2) : "-";
    const facts = [
      ["used", `${whole(f.used)} of ${whole(blocks)} blocks (${percent(f.used, blocks)})`],
      ["free", `${whole(f.free)} blocks`],
      ["live", `${whole(f.live)} slots (${percent(f.live, slots)})`],
      ["dead", `${whole(f.dead)} slots (${percent(f.dead, slots)})`],
      ["held over dense", `${over} times`],
      ["reclaimable", `${whole(f.table_blocks - f.ideal_blocks)} blocks`],
    ];
    if (f.reserved) facts.push(["in a copy alone", `${whole(f.reserved)} blocks`]);
    this.facts.replaceChildren(
      ...facts.map(([name, value]) => {
        const part = element("span");
        part.append(element("b", {}, `${name} `), value);
        return part;
      }),
    );
    this.canvas.setAttribute("aria-label", `Block map. ${facts.map((fact) => fact.join(" ")).join(", ")}.`);
  }

  // What happened since the frame before.
  events() {
    const { frames, at } = this.pool;
    const said = [];
    const add = (count, one, many) => count && said.push(`${whole(count)} ${count === 1 ? one : many}`);
    add(frames.admitted[at], "request admitted", "requests admitted");
    add(frames.finished[at], "request finished", "requests finished");
    add(frames.preempted[at], "request preempted", "requests preempted");
    add(frames.died[at], "token died", "tokens died");
    const from = frames.from[at].length;
    if (from) {
      add(frames.committed[at] + frames.packed[at], "repack", "repacks");
      said.push(`${said.pop()} moved ${whole(frames.moved[at])} tokens out of ${whole(from)} ${from === 1 ? "block" : "blocks"}`);
    }
    return said.join(", ") || "nothing died, nothing moved";
  }

  hover(event) {
    let block = -1;
    if (event) {
      const box = this.canvas.getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left) / this.size);
      const row = Math.floor((event.clientY - box.top + this.scroller.scrollTop) / this.size);
      if (column < this.columns) block = row * this.columns + column;
      if (block >= this.pool.map.num_blocks) block = -1;
    }
    this.tip.hidden = block < 0;
    if (block >= 0) {
      this.tip.replaceChildren(...this.pool.describe(block).map((line) => element("div", {}, line)));
      const box = this.root.getBoundingClientRect();
      const left = Math.min(event.clientX - box.left + 14, box.width - this.tip.offsetWidth - 4);
      this.tip.style.left = `${Math.max(0, left)}px`;
      this.tip.style.top = `${event.clientY - box.top + 16}px`;
    }
    if (block !== this.hovered) {
      this.hovered = block;
      this.draw();
    }
  }
}
