
// The table of demands shows those that are chosen.
(() => {
  const table = document.getElementById("page-demands");
  if (!table) return;
  const rows = [...table.tBodies[0].rows];
  const choices = [...document.querySelectorAll("select[data-filter]")];
  const words = document.getElementById("page-demand-words");
  const shown = document.getElementById("page-demands-shown");

  function choose() {
    const wanted = words.value.trim().toLowerCase();
    let n = 0;
    for (const row of rows) {
      const fits = choices.every(({ value, dataset }) => !value || row.dataset[dataset.filter] === value) && row.textContent.toLowerCase().includes(wanted);
      row.classList.toggle("hidden", !fits);
      n += fits;
    }
    shown.textContent = `${n.toLocaleString("en")} of ${rows.length.toLocaleString("en")} demands`;
  }

  for (const choice of choices) choice.addEventListener("change", choose);
  words.addEventListener("input", choose);
})();
