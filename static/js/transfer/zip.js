/** Reads one file out of a ZIP archive, as ChatGPT and Claude export. */

const END = 0x06054b50;
const ENTRY = 0x02014b50;
const END_BYTES = 22;
const ENTRY_BYTES = 46;
const LOCAL_BYTES = 30;
const MOST_COMMENT = 0xffff;
const MOST_BYTES = 1 << 30; // of the file that is read; chosen: no browser holds much more as one text

/**
 * The text of the file of this name in an archive, whatever folder it lies in.
 *
 * @param {Blob} blob
 * @param {string} name
 * @returns {Promise<?string>} null where this is no archive, or has no such file that can be read
 */
export async function textInZip(blob, name) {
  const tail = await view(blob, Math.max(0, blob.size - END_BYTES - MOST_COMMENT), blob.size);
  let end = tail.byteLength - END_BYTES;
  while (end >= 0 && tail.getUint32(end, true) !== END) end -= 1;
  if (end < 0) return null;
  const from = tail.getUint32(end + 16, true);
  const entry = find(await view(blob, from, from + tail.getUint32(end + 12, true)), name);
  if (!entry || entry.numBytes > MOST_BYTES) return null;
  const local = await view(blob, entry.at, entry.at + LOCAL_BYTES);
  if (local.byteLength < LOCAL_BYTES) return null;
  const begin = entry.at + LOCAL_BYTES + local.getUint16(26, true) + local.getUint16(28, true);
  const packed = blob.slice(begin, begin + entry.numPacked);
  if (entry.method === 0) return packed.text();
  return entry.method === 8 ? new Response(packed.stream().pipeThrough(new DecompressionStream('deflate-raw'))).text() : null;
}

/** Where the directory says that a file lies, and how it is packed. */
function find(directory, name) {
  const decoder = new TextDecoder();
  for (let at = 0; at + ENTRY_BYTES <= directory.byteLength && directory.getUint32(at, true) === ENTRY;) {
    const lengths = [28, 30, 32].map((field) => directory.getUint16(at + field, true));
    const path = decoder.decode(new Uint8Array(directory.buffer, at + ENTRY_BYTES, Math.min(lengths[0], directory.byteLength - at - ENTRY_BYTES)));
    if (path.split('/').at(-1) === name) {
      return { method: directory.getUint16(at + 10, true), numPacked: directory.getUint32(at + 20, true), numBytes: directory.getUint32(at + 24, true),
        at: directory.getUint32(at + 42, true) };
    }
    at += ENTRY_BYTES + lengths[0] + lengths[1] + lengths[2];
  }
  return null;
}

const view = async (blob, from, to) => new DataView(await blob.slice(from, to).arrayBuffer());
