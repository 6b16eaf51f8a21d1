/** Code highlighting for the languages that chat answers usually hold. */

import hljs from '../vendor/highlight/core.min.js';
import bash from '../vendor/highlight/languages/bash.min.js';
import c from '../vendor/highlight/languages/c.min.js';
import cpp from '../vendor/highlight/languages/cpp.min.js';
import css from '../vendor/highlight/languages/css.min.js';
import diff from '../vendor/highlight/languages/diff.min.js';
import go from '../vendor/highlight/languages/go.min.js';
import ini from '../vendor/highlight/languages/ini.min.js';
import java from '../vendor/highlight/languages/java.min.js';
import javascript from '../vendor/highlight/languages/javascript.min.js';
import json from '../vendor/highlight/languages/json.min.js';
import python from '../vendor/highlight/languages/python.min.js';
import rust from '../vendor/highlight/languages/rust.min.js';
import sql from '../vendor/highlight/languages/sql.min.js';
import xml from '../vendor/highlight/languages/xml.min.js';
import yaml from '../vendor/highlight/languages/yaml.min.js';

const LANGUAGES = { bash, c, cpp, css, diff, go, ini, java, javascript, json, python, rust, sql, xml, yaml };
const LONGEST = 20000; // characters; chosen: a longer block would take more than one frame

for (const [name, grammar] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, grammar);
hljs.registerAliases(['typescript', 'ts', 'tsx'], { languageName: 'javascript' });

/** Highlighted HTML of some code, or null where the language is unknown or the code too long. */
export function highlight(code, language) {
  if (code.length > LONGEST || !hljs.getLanguage(language)) return null;
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}
