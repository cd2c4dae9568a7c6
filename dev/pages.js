// What is wrong with a page as it is drawn: texts with a contrast below LEAST, and an overflow.
(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true}), colors = new Map();
  const rgba = (text) => {
    if (!colors.has(text)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = text;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      colors.set(text, [r, g, b, a / 255]);
    }
    return colors.get(text);
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const light = (color) => {
    const [r, g, b] = color.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const backOf = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    const schemes = getComputedStyle(document.documentElement).colorScheme;
    const dark = /dark/.test(schemes) && matchMedia("(prefers-color-scheme: dark)").matches;
    return layers.reverse().reduce((under, top) => over(top, under), dark ? [18, 18, 18, 1] : [255, 255, 255, 1]);
  };
  const name = (element) => `${element.tagName.toLowerCase()}.${element.getAttribute("class") || ""}`;
  const problems = new Map();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement, text = walk.currentNode.textContent.trim();
    if (!text || !element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (element.closest("script, style, noscript, template, [aria-hidden=true], [hidden]")) continue;
    const box = element.getBoundingClientRect();
    if (box.width < 2 || box.height < 2) continue;
    const style = getComputedStyle(element), back = backOf(element);
    const front = over(rgba(element.closest("svg") ? style.fill : style.color), back);
    const [low, high] = [light(front), light(back)].sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < LEAST) problems.set(name(element), `contrast ${contrast.toFixed(2)}: ${name(element)} ${text.slice(0, 50)}`);
  }
  const {scrollWidth: width, clientWidth: screen} = document.documentElement;  // innerWidth grows with the content
  const made = [...problems.values()];
  if (width > screen) {
    const wide = [...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > screen + 1);
    made.push(`overflow: ${width} px wide, ${wide.slice(0, 3).map(name).join(", ")}`);
  }
  return made;
})()
