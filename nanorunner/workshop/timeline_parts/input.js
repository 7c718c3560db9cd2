// Mouse and keyboard.

const CLICK = 4; // pixels: what moves less is a click
let dragged = null; // { x, y, far }: where the button went down, and how far the mouse has come

canvas.addEventListener("pointerdown", (event) => {
  dragged = { x: event.clientX, y: event.clientY, far: 0 };
  canvas.setPointerCapture(event.pointerId);
  canvas.classList.add("dragged");
});

canvas.addEventListener("pointermove", (event) => {
  if (dragged !== null) {
    const moved = event.clientX - dragged.x;
    window.scrollBy(0, dragged.y - event.clientY);
    state.view.move(-moved / (state.view.width - GUTTER - RIGHT));
    const far = dragged.far + Math.abs(moved) + Math.abs(event.clientY - dragged.y);
    dragged = { x: event.clientX, y: event.clientY, far };
  }
  state.hovered = spanAt(state, event.offsetX, event.offsetY);
  showTip(tip, dragged === null ? state.hovered : null, event);
  drawSoon();
});

canvas.addEventListener("pointerup", (event) => {
  const isClick = dragged !== null && dragged.far < CLICK;
  dragged = null;
  canvas.classList.remove("dragged");
  if (isClick && event.offsetX < GUTTER) fold(rankAt(runs, event.offsetY));
  const found = isClick ? spanAt(state, event.offsetX, event.offsetY) : null;
  if (found !== null && stepNumbers.includes(found.span[STEP])) pickStep(found.span[STEP]);
});

canvas.addEventListener("pointerleave", () => {
  state.hovered = null;
  tip.hidden = true;
  drawSoon();
});

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    state.view.move((event.deltaX || event.deltaY) / state.view.width);
  } else {
    state.view.zoom(WHEEL_ZOOM ** event.deltaY, event.offsetX);
  }
  drawSoon();
}, { passive: false });

const middle = () => (GUTTER + state.view.width) / 2;
const KEYS = {
  ArrowLeft: () => state.view.move(-PAN),
  ArrowRight: () => state.view.move(PAN),
  "+": () => state.view.zoom(1 / ZOOM, middle()),
  "=": () => state.view.zoom(1 / ZOOM, middle()),
  "-": () => state.view.zoom(ZOOM, middle()),
  "[": () => pickNext(-1),
  "]": () => pickNext(1),
  0: showAll,
  Escape: () => pickStep(null),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
  drawSoon();
});

pick.addEventListener("change", () => {
  pickStep(pick.value === "" ? null : Number(pick.value));
  canvas.focus(); // the arrow keys move the picture again
});
for (const [id, key] of [["before", "["], ["after", "]"], ["out", "-"], ["in", "+"], ["fit", 0]]) {
  document.getElementById(id).addEventListener("click", () => {
    KEYS[key]();
    drawSoon();
  });
}
window.addEventListener("resize", drawSoon);

fillPage();
showFirst();
draw();
window.timeline = state; // for the console
