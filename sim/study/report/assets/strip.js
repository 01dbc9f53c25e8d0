// The chart below the slider: blocks over time, with the repacks marked. It can be clicked and dragged.

const STRIP_HEIGHT = 92;

class Strip {
  constructor(pool, colours, { label, range, top, onSeek }) {
    Object.assign(this, { pool, colours, range, top });
    this.root = element("div", { class: "strip" });
    this.canvas = element("canvas", { role: "img" });
    this.canvas.setAttribute(
      "aria-label",
      `Blocks over time of ${label}: used at most ${whole(Math.max(...pool.frames.used))}; ` +
        `frames with a repack: ${whole(pool.frames.from.filter((blocks) => blocks.length).length)}`,
    );
    this.root.append(this.canvas);
    const seek = (event) => {
      if (event.type === "pointermove" && !(event.buttons & 1)) return;
      const box = this.canvas.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      onSeek(range[0] + share * (range[1] - range[0]));
    };
    this.canvas.addEventListener("pointerdown", seek);
    this.canvas.addEventListener("pointermove", seek);
  }

  x(time) {
    const [first, last] = this.range;
    return ((time - first) / (last - first || 1)) * this.width;
  }

  y(blocks) {
    return STRIP_HEIGHT - 12 - (blocks / this.top) * (STRIP_HEIGHT - 18);
  }

  line(context, values, style, dash, width) {
    const times = this.pool.frames.time_s;
    context.beginPath();
    values.forEach((value, i) => context.lineTo(this.x(times[i]), this.y(value)));
    context.strokeStyle = style;
    context.lineWidth = width;
    context.setLineDash(dash);
    context.stroke();
  }

  draw(time) {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.root.clientWidth;
    if (!this.width) return;
    this.canvas.width = this.width * ratio;
    this.canvas.height = STRIP_HEIGHT * ratio;
    this.canvas.style.height = `${STRIP_HEIGHT}px`;
    const context = this.canvas.getContext("2d");
    const colours = this.colours();
    const { frames, map } = this.pool;
    context.scale(ratio, ratio);
    context.clearRect(0, 0, this.width, STRIP_HEIGHT);

    const times = frames.time_s;
    const dense = frames.table_blocks.map((listed, i) => frames.used[i] - (listed - frames.ideal_blocks[i]));
    context.beginPath();
    times.forEach((t, i) => context.lineTo(this.x(t), this.y(frames.used[i])));
    for (let i = times.length - 1; i >= 0; i--) context.lineTo(this.x(times[i]), this.y(Math.max(0, dense[i])));
    context.fillStyle = colours.deadWash;
    context.fill();
    this.line(context, frames.live.map((live) => live / map.block_size), colours.liveText, [4, 3], 1.5);
    this.line(context, frames.used, colours.ink, [], 1.5);

    context.setLineDash([]);
    frames.from.forEach((blocks, i) => {
      if (!blocks.length) return;
      const x = this.x(times[i]);
      context.beginPath();
      context.moveTo(x, STRIP_HEIGHT - 9);
      context.lineTo(x - 3.5, STRIP_HEIGHT - 2);
      context.lineTo(x + 3.5, STRIP_HEIGHT - 2);
      context.fillStyle = colours.destinationText;
      context.fill();
    });
    frames.preempted.forEach((count, i) => {
      if (!count) return;
      const x = this.x(times[i]);
      context.beginPath();
      for (const [dx, dy] of [[-3, 0], [3, 6]]) context.lineTo(x + dx, dy + 1);
      context.moveTo(x + 3, 1);
      context.lineTo(x - 3, 7);
      context.strokeStyle = colours.deadText;
      context.lineWidth = 1.5;
      context.stroke();
    });
    context.fillStyle = colours.quiet;
    context.font = "11px system-ui, sans-serif";
    context.fillText(`${whole(this.top)} blocks`, 3, 11);
    context.fillStyle = colours.ink;
    context.fillRect(Math.min(this.width - 2, Math.max(0, this.x(time) - 1)), 0, 2, STRIP_HEIGHT);
  }
}
