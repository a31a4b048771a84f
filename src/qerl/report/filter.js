// Shows the completions that fit the choices above them. Without it all are shown, and can be opened.
const form = document.getElementById("filter");
const groups = [...document.querySelectorAll(".group")];
const samples = new Map(groups.map((group) => [group, [...group.querySelectorAll(".sample")]]));

function apply() {
  const chosen = new FormData(form);
  const words = chosen.get("words").toLowerCase();
  const [least, most] = [chosen.get("least"), chosen.get("most")];
  let shown = 0;
  for (const group of groups) {
    const fits = ["run", "step", "rank"].every((name) => !chosen.get(name) || group.dataset[name] === chosen.get(name));
    const asked = group.querySelector(".prompt").textContent.toLowerCase().includes(words);
    let inside = 0;
    for (const sample of samples.get(group)) {
      const reward = sample.dataset.reward;
      const keeps = fits
        && (least === "" || (reward !== "" && Number(reward) >= Number(least)))
        && (most === "" || (reward !== "" && Number(reward) <= Number(most)))
        && (asked || sample.textContent.toLowerCase().includes(words));
      sample.hidden = !keeps;
      inside += keeps;
    }
    group.hidden = inside === 0;
    shown += inside;
  }
  form.querySelector("output").textContent = `${shown} completions`;
}

form.addEventListener("input", apply);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(apply));
document.getElementById("open").addEventListener("click", () => {
  const visible = groups.filter((group) => !group.hidden);
  const open = !visible.every((group) => group.open);
  for (const group of visible) group.open = open;
});
form.hidden = false;
apply();
