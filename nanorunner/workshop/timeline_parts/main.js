// The page: its data, its controls, and when it is drawn anew.

const data = JSON.parse(document.getElementById("data").textContent);
const { names, meanings, runs } = data;
const [canvas, tip, pick, statusLine] =
  ["lanes", "tip", "pick", "status"].map((id) => document.getElementById(id));
const FIRST_STEPS = 4; // that are seen at first
const WHEEL_ZOOM = 1.0015; // a unit of the wheel; a notch has 100
const PAN = 0.15, ZOOM = 1.4; // a key's

for (const run of runs) [run.origin, run.pickedFrames] = [0, new Set()];
const state = { runs, picked: null, hovered: null, height: layOut(runs), view: null };
state.view = new View(...limits());
const stepNumbers = [...new Set(runs.flatMap((run) => run.steps.map(([number]) => number)))]
  .sort((a, b) => a - b);

// The first and the last moment of all runs, on the common clock.
function limits() {
  const first = Math.min(...runs.map((run) => run.begin - run.origin));
  const last = Math.max(...runs.map((run) => run.end - run.origin));
  const margin = (last - first) * 0.01;
  return [first - margin, last + margin];
}

function spansOf(run) {
  return run.ranks.flatMap((rank) => rank.lanes.flatMap((lane) => lane.spans));
}

function showFirst() {
  const shown = data.shows_all ? Infinity : FIRST_STEPS;
  const ends = runs.map((run) => run.steps[Math.min(shown, run.steps.length) - 1][2]);
  const last = Math.max(...ends);
  state.view.show(-last * 0.02, last * 1.01);
}

// Pick a step by its number, null for none: it alone is in full colour and begins at 0 ms.
function pickStep(number) {
  state.picked = number;
  let longest = 0;
  for (const run of runs) {
    const spans = spansOf(run).filter((span) => span[STEP] === number && span[FRAME] > 0);
    run.pickedFrames = new Set(spans.map((span) => span[FRAME]));
    const step = run.steps.find((each) => each[0] === number);
    run.origin = step ? step[1] : 0;
    if (step) longest = Math.max(longest, step[2] - step[1]);
  }
  state.view.limit(...limits());
  if (number === null) showFirst();
  else state.view.show(-0.1 * longest, 1.1 * longest);
  pick.value = number === null ? "" : String(number);
  draw();
}

function pickNext(by) {
  const place = stepNumbers.indexOf(state.picked);
  const next = state.picked === null ? (by > 0 ? 0 : stepNumbers.length - 1) : place + by;
  if (next >= 0 && next < stepNumbers.length) pickStep(stepNumbers[next]);
}

function fold(rank) {
  if (rank === null) return;
  rank.isFolded = !rank.isFolded;
  state.height = layOut(runs);
  draw();
}

function showAll() {
  state.view.show(...limits());
  draw();
}

function draw() {
  const ratio = window.devicePixelRatio || 1;
  state.view.width = canvas.clientWidth;
  canvas.style.height = `${state.height}px`;
  canvas.width = Math.round(canvas.clientWidth * ratio);
  canvas.height = Math.round(state.height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  drawAll(context, state);
  const words = [`${lengthInWords(state.view.to - state.view.from)} in view`];
  words.push(state.picked === null ? "0 ms: the first step here is planned"
    : `0 ms: step ${state.picked} is planned`);
  if (runs.some((run) => run.hasTooManyArrows)) words.push("come closer to see the arrows");
  statusLine.textContent = words.join("; ");
}

let isDrawingAsked = false;
function drawSoon() {
  if (isDrawingAsked) return;
  isDrawingAsked = true;
  requestAnimationFrame(() => {
    isDrawingAsked = false;
    draw();
  });
}

function fillPage() {
  pick.append(new Option("none picked", ""));
  for (const number of stepNumbers) pick.append(new Option(String(number), String(number)));
  const used = new Set(runs.flatMap(spansOf).map((span) => names[span[NAME]]));
  const legend = document.getElementById("legend");
  for (const name of names.filter((each) => used.has(each))) {
    legend.append(legendEntry(name, meanings[name], (context) => {
      const place = name === "ack" ? [15, 0, 1, 18] : [0, 0, 30, 18];
      drawBar(context, { lane: "" }, [0, 0, 0, -1, 0, 0], name, place, { left: 0, width: 30 });
    }));
    document.getElementById("meanings").append(element("dt", name), element("dd", meanings[name]));
  }
  for (const kind of new Set(runs.flatMap((run) => run.arrows.map((arrow) => arrow[KIND])))) {
    legend.append(legendEntry(data.arrow_titles[kind], ARROW_MEANINGS[kind], (context) => {
      const lane = (top) => ({ lane: `${top}`, top, strip: 0, bar: 0 });
      const ends = [kind, 0, 0, 0, "2", 2e6, 0, "17", 28e6];
      const view = { x: (time) => time / 1e6 };
      drawArrow(context, { origin: 0, ranks: [{ lanes: [lane(2), lane(17)] }] }, ends, view, 1.8);
    }));
    document.getElementById("meanings").append(
      element("dt", `arrow: ${data.arrow_titles[kind]}`), element("dd", ARROW_MEANINGS[kind]));
  }
  document.getElementById("meanings").append(element("dt", "white"), element("dd",
    "nothing is recorded: on rank 0 the caller's time, on the others the wait for a frame"));
  legend.append(legendEntry("strips and dashed lines: which step", "a colour a step, four in turn",
    (context) => STEP_COLOURS.forEach((colour, place) => {
      context.fillStyle = colour;
      context.fillRect(place * 7.5, 6, 7, 6);
    })));
  for (const run of runs) {
    const about = element("p", run.notes.join(" "));
    if (runs.length > 1) about.prepend(element("b", `${run.title}: `));
    document.getElementById("runs").append(about);
  }
}

function legendEntry(name, meaning, drawIt) {
  const entry = document.createElement("span"), swatch = document.createElement("canvas");
  const ratio = window.devicePixelRatio || 1;
  [swatch.width, swatch.height] = [30 * ratio, 18 * ratio];
  const context = swatch.getContext("2d");
  context.scale(ratio, ratio);
  drawIt(context);
  entry.title = meaning;
  entry.append(swatch, element("span", name));
  return entry;
}
