// The lanes: bars with their names, strips that tell the steps apart, bubbles, the ruler.

const FONT = 'system-ui, "DejaVu Sans", sans-serif';
// What belongs together is alike: the engine violet, what makes the inputs ochre, work blue and
// green, what the ranks do together dark, waiting pale.
const COLOURS = {
  schedule: "#cdb4e8", update: "#e3b7e0",
  wire: "#b9c4d0", send: "#8fa6c4", receive: "#7fb0b8", ack: "#22406b", run: "#e3eaf3",
  apply: "#f2d59a", stage: "#eac06a", prepare: "#e0a93f",
  forward: "#8fc1ee", sample: "#98d3a0", graph: "#7fd0cb", draft: "#c3d66f",
  all_reduce: "#2f6fb3", exchange: "#2f8a4c", download: "#c9a88f",
  wait: "#eeeeee", idle: "#f7f7f7", bubble: "#fde4e1",
};
const OTHER_COLOUR = "#d0d0d0";
const LIGHT_TEXT = new Set(["all_reduce", "exchange"]);
const HATCHED = { wait: "#c4c4c4", bubble: "#d93025" };
const STEP_COLOURS = ["#2b5fae", "#d9772b", "#3f8f3f", "#9c3f97"];
const BUBBLE_COLOUR = "#b3160b";
const DIMMED = 0.16;
// pixels
const MARK = 2, MARKS_APART = 12, LINES_APART = 24, LENGTHS_APART = 70, SHORTEST_LABEL = 24;

function drawAll(context, state) {
  const { view, runs } = state;
  context.clearRect(0, 0, view.width, state.height);
  for (const run of runs) {
    drawRuler(context, run, state);
    for (const rank of run.ranks) {
      const middle = rank.isFolded ? FOLDED / 2 : STRIP + BAR / 2;
      const mark = rank.isFolded ? "\u25b8" : "";
      text(context, `rank ${rank.rank} ${mark}`, 0, rank.top + middle, `600 18px ${FONT}`);
      if (rank.isFolded) continue;
      for (const lane of rank.lanes) {
        drawLaneName(context, lane);
        clipped(context, view, lane.top, lane.bottom, () => drawLane(context, run, lane, state));
      }
    }
    clipped(context, view, run.lanesTop - 14, run.bottom, () => drawArrows(context, run, state));
  }
}

function clipped(context, view, top, bottom, draw) {
  context.save();
  context.beginPath();
  context.rect(GUTTER, top, view.width - GUTTER - RIGHT, bottom - top);
  context.clip();
  draw();
  context.restore();
}

function drawRuler(context, run, { view, picked }) {
  const y = run.top + RUN_TITLE, right = view.width - RIGHT;
  text(context, run.title, 0, run.top + RUN_TITLE / 2, `600 18px ${FONT}`);
  const { found, digits } = ticks(view.from, view.to, Math.max(2, view.width / 190));
  context.strokeStyle = "#d5d5d5";
  context.lineWidth = 1;
  for (const tick of found) {
    const x = Math.round(view.x(tick)) + 0.5;
    line(context, x, y + 19, x, run.bottom);
    const label = tick === 0 ? "0" : (tick / 1e6).toFixed(digits);
    text(context, `${label} ms`, x, y + 9, `15px ${FONT}`, "#555", "center", GUTTER, right);
  }
  clipped(context, view, y + 18, run.bottom, () => {
    let free = -Infinity, freeLine = -Infinity; // where the next flag and line have room
    for (const [number, begin] of run.steps) {
      const x = view.x(begin - run.origin);
      if (x < Math.max(GUTTER - 120, freeLine) || x > right) continue;
      freeLine = x + LINES_APART;
      context.strokeStyle = colourOf(number);
      context.setLineDash([5, 4]);
      line(context, x, y + 20, x, run.bottom);
      context.setLineDash([]);
      if (x < free) continue;
      const font = `${number === picked ? 700 : 500} 15px ${FONT}`;
      free = x + 10 + text(context, `step ${number}`, x + 4, y + 31, font, colourOf(number));
    }
  });
}

function drawLaneName(context, lane) {
  const y = lane.absent ? lane.top + ABSENT / 2 : lane.top + lane.strip + lane.bar / 2;
  const font = `15px ${FONT}`;
  text(context, lane.title, GUTTER - 10, y, font, "#333", "right");
  if (!lane.absent) return;
  const width = text(context, lane.absent, GUTTER + 8, y, `italic ${font}`, "#666");
  context.fillStyle = "#fff"; // the dashed lines end at it
  context.fillRect(GUTTER + 4, lane.top, width + 8, ABSENT);
  text(context, lane.absent, GUTTER + 8, y, `italic ${font}`, "#666");
}

function drawLane(context, run, lane, state) {
  if (lane.absent) return;
  const { view } = state;
  drawStrip(context, run, lane, view);
  const [from, to] = [view.from + run.origin, view.to + run.origin];
  const seen = lane.spans.filter((span) => span[END] >= from && span[BEGIN] <= to);
  const numBubbles = seen.filter((span) => names[span[NAME]] === "bubble").length;
  const hasLengths = numBubbles * LENGTHS_APART < view.width;
  let freeLabel = -Infinity; // where the next bubble's length has room
  // What is less than a pixel wide has a pixel's share of its colour, so that from afar a lane looks
  // as it was on the whole; where it stands alone it is made wide enough to be seen.
  let freeMark = -Infinity;
  for (const span of seen) {
    const name = names[span[NAME]];
    const x = view.x(span[BEGIN] - run.origin), right = view.x(span[END] - run.origin);
    let width = right - x;
    if (width < MARK && x >= freeMark) {
      width = Math.max(width, name === "bubble" ? MARK : 1);
      freeMark = x + MARKS_APART;
    }
    context.globalAlpha = isDimmed(span, run, state) ? DIMMED : 1;
    const [top, height] = placeOf(lane, span);
    drawBar(context, lane, span, name, [x, top, width, height], view);
    if (name !== "bubble" || !hasLengths) continue;
    freeLabel = drawBubbleLength(context, lane, span, x, right, freeLabel);
  }
  context.globalAlpha = 1;
}

function drawBar(context, lane, span, name, [x, y, width, height], view) {
  if (name === "ack") { // a moment
    context.fillStyle = COLOURS.ack;
    context.fillRect(x - width, y, 2 * width, height);
    return;
  }
  const left = Math.max(x, view.left - 5), right = Math.min(x + width, view.width);
  if (right <= left) return;
  context.fillStyle = COLOURS[name] ?? OTHER_COLOUR;
  context.fillRect(left, y, right - left, height);
  if (HATCHED[name] && right - left > 2) hatch(context, left, y, right - left, height, name);
  if (name === "bubble" && width >= MARK) {
    context.strokeStyle = BUBBLE_COLOUR;
    context.lineWidth = 1.5;
    context.strokeRect(x, y + 0.75, width, height - 1.5);
    context.lineWidth = 1;
  } else if (width > 3) {
    context.strokeStyle = "#ffffff";
    context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  }
  drawLabel(context, lane, span, name, Math.max(left, view.left), right, y + height / 2, height);
}

// The span's name, with its step or frame where there is room; nothing where there is none.
function drawLabel(context, lane, span, name, left, right, middle, height) {
  if (right - left < SHORTEST_LABEL) return;
  const number = lane.lane === "wire" ? `frame ${span[FRAME]}` : span[STEP] < 0 ? "" : span[STEP];
  const colour = LIGHT_TEXT.has(name) ? "#fff" : name === "bubble" ? BUBBLE_COLOUR : "#111";
  context.font = `${name === "bubble" ? 600 : 400} ${height < 20 ? 13 : 15}px ${FONT}`;
  for (const label of [`${name} ${number}`, name]) {
    if (context.measureText(label).width + 8 > right - left) continue;
    text(context, label, (left + right) / 2, middle + 0.5, context.font, colour, "center");
    return;
  }
}

function drawBubbleLength(context, lane, span, x, right, freeX) {
  const label = lengthInWords(span[END] - span[BEGIN]);
  context.font = `600 15px ${FONT}`;
  const width = context.measureText(label).width;
  const left = (x + right - width) / 2, y = lane.bottom - BUBBLE_ROW / 2 + 1;
  if (left < freeX) return freeX;
  text(context, label, left, y, context.font, BUBBLE_COLOUR);
  return left + width + 8;
}

// Which step the lane is at: a strip in the step's colour above its outermost spans.
function drawStrip(context, run, lane, view) {
  if (!lane.strip) return;
  let [step, begin, end] = [-1, 0, 0]; // spans of one step that follow each other are one strip
  const strip = () => {
    const x = view.x(begin - run.origin), right = view.x(end - run.origin);
    if (step < 0 || right < GUTTER || x > view.width) return;
    context.fillStyle = colourOf(step);
    context.fillRect(x, lane.top, right - x, STRIP - 1);
  };
  for (const span of lane.spans) {
    if (span[DEPTH] || names[span[NAME]] === "bubble") continue;
    if (span[STEP] === step && span[BEGIN] === end) {
      end = span[END];
      continue;
    }
    strip();
    [begin, end, step] = [span[BEGIN], span[END], span[STEP]];
  }
  strip();
}

// Whether another step is picked. What a rank does before it knows the step has its frame.
function isDimmed(span, run, { picked }) {
  return picked !== null && span[STEP] !== picked && !run.pickedFrames.has(span[FRAME]);
}

function colourOf(step) {
  return STEP_COLOURS[step % STEP_COLOURS.length];
}

function hatch(context, x, y, width, height, name) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = HATCHED[name];
  context.globalAlpha *= 0.55;
  for (let at = Math.floor(x / 9) * 9 - height; at < x + width; at += 9) {
    line(context, at, y + height, at + height, y);
  }
  context.restore();
}

function line(context, x1, y1, x2, y2) {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

// Write a text, kept between two places if they are given; return its width.
function text(context, words, x, y, font, colour = "#111", align = "left", least, most) {
  context.font = font;
  context.fillStyle = colour;
  context.textAlign = align;
  context.textBaseline = "middle";
  const width = context.measureText(words).width;
  if (least !== undefined) x = Math.min(Math.max(x, least + width / 2), most - width / 2);
  context.fillText(words, x, y);
  return width;
}
