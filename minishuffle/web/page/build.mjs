// Builds the page into the folder that is named, or into built/: see scripts/build-page, which says where the
// packages are. The same sources give the same bytes.
import { copyFile, mkdir } from "node:fs/promises";
import { createRequire } from "node:module";
import { join } from "node:path";

const here = import.meta.dirname;
const packages = process.env.PAGE_PACKAGES;
const out = process.argv[2] ?? join(here, "built");
const { build } = createRequire(join(packages, "package.json"))("esbuild");

await mkdir(out, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: ["src/app.tsx", "src/style.css"],
  nodePaths: [join(packages, "node_modules")],
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  jsx: "automatic",
  jsxImportSource: "preact",
  charset: "utf8",
  legalComments: "none", // They are in LICENSES.txt.
});
for (const name of ["index.html", "icon.svg", "LICENSES.txt"]) {
  await copyFile(join(here, "src", name), join(out, name));
}
