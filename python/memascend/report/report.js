"use strict";
// Shows the values of the step under the pointer, or of the one that the arrow keys have chosen.
for (const figure of document.querySelectorAll("figure.plot")) {
  const data = JSON.parse(figure.querySelector("script.values").textContent);
  const canvas = figure.querySelector(".canvas");
  const cursor = figure.querySelector(".cursor");
  const tip = figure.querySelector(".tip");
  const steps = data.steps;
  const first = steps[0];
  const span = Math.max(steps[steps.length - 1] - first, 1);
  let chosen = -1;

  const element = (parent, tag, kind, text) => {
    const made = parent.appendChild(document.createElement(tag));
    if (kind) made.className = kind;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const hide = () => {
    chosen = -1;
    tip.hidden = cursor.hidden = true;
  };

  const show = (position) => {
    chosen = Math.min(Math.max(position, 0), steps.length - 1);
    const share = (steps[chosen] - first) / span;
    tip.textContent = "";
    element(tip, "div", "step", "step " + steps[chosen].toLocaleString("en"));
    data.series.forEach(([name, values], number) => {
      if (values[chosen] === null) return;
      const row = element(tip, "div", "row");
      element(row, "span", number < data.areas ? "swatch c" + (number % data.colours) : "swatch");
      element(row, "span", "name", name + " ");
      element(row, "b", "", values[chosen] + data.unit);
    });
    tip.hidden = cursor.hidden = false;
    cursor.style.left = share * 100 + "%";
    const room = canvas.clientWidth - tip.offsetWidth;
    const beside = share * canvas.clientWidth + (share < 0.5 ? 12 : -12 - tip.offsetWidth);
    tip.style.left = Math.min(Math.max(beside, 0), Math.max(room, 0)) + "px";
  };

  const nearest = (step) => {
    let low = 0;
    let high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle;
      else high = middle;
    }
    return step - steps[low] <= steps[high] - step ? low : high;
  };

  const follow = (event) => {
    const box = canvas.getBoundingClientRect();
    show(nearest(first + ((event.clientX - box.left) / box.width) * span));
  };

  canvas.addEventListener("pointermove", follow);
  canvas.addEventListener("pointerdown", follow);
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("blur", hide);
  canvas.addEventListener("keydown", (event) => {
    const last = steps.length - 1;
    const from = chosen < 0 ? last + 1 : chosen;
    const to = { ArrowLeft: from - 1, ArrowRight: chosen + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") hide();
    else if (to !== undefined) {
      show(to);
      event.preventDefault();
    }
  });
}
