/* Reads the list of messages of a JSON body, where these are plain: objects with a role, and text as their content.
 * Those of a chat may have further fields.
 *
 * What is written of them is, to the byte, what dualmap/api_bodies/prompt.py renders of the chat that the body is, or that
 * messages_api.py and responses_api.py make of it. Everything else is left to those: other parts than text, escaped or
 * repeated keys, lone surrogates, numbers that readers of JSON may differ about, anything that is no JSON. What is taken
 * for JSON here is JSON to every reader, so a body never gets another meaning by being read here.
 *
 * The object around the list is not looked at: it is returned with one string in place of the messages, for a reader of
 * JSON (listed_json.py says why that is enough).
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#define _GNU_SOURCE
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define STEP 16         /* bytes that are looked at, and copied, at once */
#define MAX_DEPTH 24    /* of what is passed over in a message */
#define MAX_DIGITS 15   /* of a number, before its point and behind it */
#define MAX_FIELDS 64   /* of an object whose fields are sorted */
#define MAX_STRING (60 << 10) /* of what is no text: readers of long bodies have other forms for longer ones */
#define MAX_LISTS 4     /* places where the list may begin; of listed_json.py */

enum { CHAT, MESSAGES, RESPONSES };
enum { PASS, TEXT, JSON }; /* what is written of a string: nothing, its text, its text as JSON without its quotes */

static const uint8_t MESSAGE = 0xFF, FIELD = 0xFE; /* of prompt.py */
#define BILLING_HEADER "x-anthropic-billing-header"

typedef struct {
    const uint8_t *data;
    size_t len;
} Span;

typedef struct {
    const uint8_t *at, *end; /* what is not read yet */
    uint8_t *out;            /* what comes next is written here; there is room for as much as is read, and for a step */
    Py_ssize_t parts;        /* parts that were read */
    Py_ssize_t values;       /* objects, arrays and strings, names among them */
    Py_ssize_t commas;
    int api;
} Reader;

typedef struct {
    Span name;
    const uint8_t *value;
} Field;

typedef struct {
    int count;
    Field of[MAX_FIELDS]; /* by name */
} Fields;

#define IS(span, text) ((span).len == sizeof(text) - 1 && memcmp((span).data, (text), sizeof(text) - 1) == 0)

/* strings -------------------------------------------------------------------------------------------------------- */

/* How many of the next STEP bytes come before one that is a quote, a backslash, a control or no ASCII. */
static inline size_t plain_of(const uint8_t *at) {
#ifdef __SSE2__
    __m128i bytes = _mm_loadu_si128((const __m128i *)at), last_control = _mm_set1_epi8(0x1F);
    __m128i quotes = _mm_cmpeq_epi8(bytes, _mm_set1_epi8('"'));
    __m128i slashes = _mm_cmpeq_epi8(bytes, _mm_set1_epi8('\\'));
    __m128i controls = _mm_cmpeq_epi8(_mm_max_epu8(bytes, last_control), last_control);
    __m128i found = _mm_or_si128(_mm_or_si128(quotes, slashes), _mm_or_si128(controls, bytes)); /* the high bit counts */
    unsigned mask = (unsigned)_mm_movemask_epi8(found);
    return mask ? (size_t)__builtin_ctz(mask) : STEP;
#else
    size_t count = 0;
    while (count < STEP && at[count] >= 0x20 && at[count] < 0x80 && at[count] != '"' && at[count] != '\\')
        count++;
    return count;
#endif
}

/* The bytes of the character that begins here and is no ASCII; 0: it is none. */
static inline size_t character(const uint8_t *at, const uint8_t *end) {
    uint8_t first = at[0];
    size_t left = (size_t)(end - at);
    if (first < 0xC2 || left < 2 || (at[1] & 0xC0) != 0x80)
        return 0;
    if (first < 0xE0)
        return 2;
    if (left < 3 || (at[2] & 0xC0) != 0x80)
        return 0;
    if (first < 0xF0) /* no shorter character, and no surrogate */
        return (first == 0xE0 && at[1] < 0xA0) || (first == 0xED && at[1] > 0x9F) ? 0 : 3;
    if (left < 4 || (at[3] & 0xC0) != 0x80 || first > 0xF4)
        return 0;
    return (first == 0xF0 && at[1] < 0x90) || (first == 0xF4 && at[1] > 0x8F) ? 0 : 4;
}

/* The number of four hexadecimal digits; -1: they are none. */
static int hexadecimal(const uint8_t *at) {
    int number = 0;
    for (int place = 0; place < 4; place++) {
        uint8_t digit = at[place], letter = digit | 0x20;
        int value = digit >= '0' && digit <= '9' ? digit - '0' : letter >= 'a' && letter <= 'f' ? letter - 'a' + 10 : -1;
        if (value < 0)
            return -1;
        number = number << 4 | value;
    }
    return number;
}

/* Reads an escape, which begins here, and writes its character. Returns where it ends; NULL: it is none to be read. */
static const uint8_t *escape(const uint8_t *at, const uint8_t *end, uint8_t **out) {
    if (end - at < 2)
        return NULL;
    uint8_t kind = at[1], *to = *out;
    switch (kind) {
    case '"': case '\\': case '/': *to++ = kind; break;
    case 'b': *to++ = '\b'; break;
    case 'f': *to++ = '\f'; break;
    case 'n': *to++ = '\n'; break;
    case 'r': *to++ = '\r'; break;
    case 't': *to++ = '\t'; break;
    case 'u': {
        int code = end - at < 6 ? -1 : hexadecimal(at + 2);
        if (code < 0 || (code >= 0xDC00 && code <= 0xDFFF))
            return NULL;
        if (code < 0x80) {
            *to++ = (uint8_t)code;
        } else if (code < 0x800) {
            *to++ = (uint8_t)(0xC0 | code >> 6);
            *to++ = (uint8_t)(0x80 | (code & 0x3F));
        } else if (code < 0xD800 || code > 0xDBFF) {
            *to++ = (uint8_t)(0xE0 | code >> 12);
            *to++ = (uint8_t)(0x80 | (code >> 6 & 0x3F));
            *to++ = (uint8_t)(0x80 | (code & 0x3F));
        } else {
            int low = end - at < 12 || at[6] != '\\' || at[7] != 'u' ? -1 : hexadecimal(at + 8);
            if (low < 0xDC00 || low > 0xDFFF)
                return NULL;
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
            *to++ = (uint8_t)(0xF0 | code >> 18);
            *to++ = (uint8_t)(0x80 | (code >> 12 & 0x3F));
            *to++ = (uint8_t)(0x80 | (code >> 6 & 0x3F));
            *to++ = (uint8_t)(0x80 | (code & 0x3F));
            at += 6;
        }
        *out = to;
        return at + 6;
    }
    default: return NULL;
    }
    *out = to;
    return at + 2;
}

/* Writes a character that was escaped, as JSON. */
static uint8_t *write_escaped(uint8_t *out, const uint8_t *character, size_t size) {
    static const char SHORT[] = "\"\\\b\f\n\r\t", LETTERS[] = "\"\\bfnrt", DIGITS[] = "0123456789abcdef";
    const char *known = size == 1 && *character ? strchr(SHORT, *character) : NULL;
    if (known != NULL) {
        *out++ = '\\';
        *out++ = (uint8_t)LETTERS[known - SHORT];
    } else if (size == 1 && *character < 0x20) {
        memcpy(out, "\\u00", 4);
        out[4] = (uint8_t)DIGITS[*character >> 4];
        out[5] = (uint8_t)DIGITS[*character & 15];
        out += 6;
    } else {
        memcpy(out, character, size);
        out += size;
    }
    return out;
}

/* Reads a string, which begins here, and writes it in this form. Returns whether it is one to be read. */
static inline int read_string(Reader *reader, int form) {
    const uint8_t *at = reader->at, *end = reader->end;
    uint8_t *out = reader->out, escaped[4];
    if (at == end || *at++ != '"')
        return 0;
    while (at < end) {
        if (end - at >= STEP) {
            size_t plain = plain_of(at);
            if (form != PASS) {
                memcpy(out, at, STEP);
                out += plain;
            }
            at += plain;
            if (plain == STEP)
                continue;
        }
        uint8_t byte = *at;
        if (byte == '"') {
            reader->at = at + 1;
            reader->values++;
            if (form != PASS)
                reader->out = out;
            return 1;
        }
        if (byte == '\\') {
            uint8_t *behind = escaped;
            at = escape(at, end, form == TEXT ? &out : &behind);
            if (at == NULL)
                return 0;
            if (form == JSON)
                out = write_escaped(out, escaped, (size_t)(behind - escaped));
            continue;
        }
        if (byte < 0x20)
            return 0;
        if (byte < 0x80) {
            if (form != PASS)
                *out++ = byte;
            at++;
            continue;
        }
        do {
            size_t size = character(at, end);
            if (size == 0)
                return 0;
            if (form != PASS) {
                memcpy(out, at, end - at >= 4 ? 4 : size);
                out += size;
            }
            at += size;
        } while (at < end && *at >= 0x80);
    }
    return 0;
}

static int write_text(Reader *reader) {
    return read_string(reader, TEXT);
}

static int pass_string(Reader *reader) {
    return read_string(reader, PASS);
}

/* JSON ----------------------------------------------------------------------------------------------------------- */
static void pass_blanks(Reader *reader) {
    while (reader->at < reader->end && (*reader->at == ' ' || *reader->at == '\n' || *reader->at == '\r' || *reader->at == '\t'))
        reader->at++;
}

/* Passes over this byte, and blanks around it. */
static int pass(Reader *reader, uint8_t byte) {
    pass_blanks(reader);
    if (reader->at == reader->end || *reader->at != byte)
        return 0;
    reader->at++;
    pass_blanks(reader);
    return 1;
}

static int is_next(const Reader *reader, uint8_t byte) {
    return reader->at < reader->end && *reader->at == byte;
}

static int pass_word(Reader *reader, const char *word) {
    size_t len = strlen(word);
    if ((size_t)(reader->end - reader->at) < len || memcmp(reader->at, word, len) != 0)
        return 0;
    reader->at += len;
    return 1;
}

static size_t pass_digits(Reader *reader) {
    const uint8_t *begin = reader->at;
    while (reader->at < reader->end && *reader->at >= '0' && *reader->at <= '9')
        reader->at++;
    return (size_t)(reader->at - begin);
}

/* A number that all readers take for the same. */
static int pass_number(Reader *reader) {
    if (is_next(reader, '-'))
        reader->at++;
    int zero = is_next(reader, '0');
    size_t digits = pass_digits(reader);
    if (digits == 0 || digits > MAX_DIGITS || (zero && digits > 1))
        return 0;
    if (is_next(reader, '.')) {
        reader->at++;
        digits = pass_digits(reader);
        if (digits == 0 || digits > MAX_DIGITS)
            return 0;
    }
    return !is_next(reader, 'e') && !is_next(reader, 'E');
}

/* Reads a string as it stands, which has no escapes. */
static int read_name(Reader *reader, Span *name) {
    const uint8_t *begin = reader->at + 1;
    if (!pass_string(reader))
        return 0;
    name->data = begin;
    name->len = (size_t)(reader->at - 1 - begin);
    return name->len <= MAX_STRING && memchr(begin, '\\', name->len) == NULL;
}

static int pass_value(Reader *reader, int depth);

/* Reads the name of an object's next field, up to its value. Returns 0 behind the last one; -1: there is none. */
static int next_field(Reader *reader, int *is_first, Span *name) {
    if (*is_first) {
        *is_first = 0;
        reader->values++;
        if (!pass(reader, '{'))
            return -1;
        if (is_next(reader, '}')) {
            reader->at++;
            return 0;
        }
    } else {
        pass_blanks(reader);
        if (is_next(reader, '}')) {
            reader->at++;
            return 0;
        }
        if (!pass(reader, ','))
            return -1;
        reader->commas++;
    }
    return read_name(reader, name) && pass(reader, ':') ? 1 : -1;
}

/* Passes to an array's next value. Returns 0 behind the last one; -1: there is none. */
static int next_value(Reader *reader, int *is_first) {
    if (*is_first) {
        *is_first = 0;
        reader->values++;
        if (!pass(reader, '['))
            return -1;
        if (!is_next(reader, ']'))
            return 1;
    } else {
        pass_blanks(reader);
        if (!is_next(reader, ']')) {
            reader->commas++;
            return pass(reader, ',') ? 1 : -1;
        }
    }
    reader->at++;
    return 0;
}

static int pass_value(Reader *reader, int depth) {
    int is_first = 1, found;
    Span name;
    if (reader->at == reader->end || depth == 0)
        return 0;
    switch (*reader->at) {
    case '"': return pass_string(reader);
    case '{':
        while ((found = next_field(reader, &is_first, &name)) > 0)
            if (!pass_value(reader, depth - 1))
                return 0;
        return found == 0;
    case '[':
        while ((found = next_value(reader, &is_first)) > 0)
            if (!pass_value(reader, depth - 1))
                return 0;
        return found == 0;
    case 't': return pass_word(reader, "true");
    case 'f': return pass_word(reader, "false");
    case 'n': return pass_word(reader, "null");
    default: return pass_number(reader);
    }
}

/* JSON in one form ------------------------------------------------------------------------------------------------
 * Equal values are written alike: without blanks, fields by name, characters as they are where they may be. */

/* Adds a field in its place; returns 0 where there is one of its name, or no room. */
static int add_field(Fields *fields, Span name, const uint8_t *value) {
    int place = fields->count;
    if (place == MAX_FIELDS)
        return 0;
    for (; place > 0; place--) {
        Span before = fields->of[place - 1].name;
        int order = memcmp(before.data, name.data, before.len < name.len ? before.len : name.len);
        if (order == 0 && before.len == name.len)
            return 0;
        if (order < 0 || (order == 0 && before.len < name.len))
            break;
        fields->of[place] = fields->of[place - 1];
    }
    fields->of[place] = (Field){name, value};
    fields->count++;
    return 1;
}

static int write_value(Reader *reader, int depth);

/* Writes an object of these fields, and stays where it is. */
static int write_fields(Reader *reader, const Fields *fields, int depth) {
    const uint8_t *end = reader->at;
    *reader->out++ = '{';
    for (int place = 0; place < fields->count; place++) {
        Span name = fields->of[place].name;
        if (place)
            *reader->out++ = ',';
        *reader->out++ = '"';
        memcpy(reader->out, name.data, name.len);
        reader->out += name.len;
        *reader->out++ = '"';
        *reader->out++ = ':';
        reader->at = fields->of[place].value;
        if (!write_value(reader, depth))
            return 0;
    }
    *reader->out++ = '}';
    reader->at = end;
    return 1;
}

static int write_object(Reader *reader, int depth) {
    Fields fields = {.count = 0};
    int is_first = 1, found;
    Span name;
    while ((found = next_field(reader, &is_first, &name)) > 0)
        if (!add_field(&fields, name, reader->at) || !pass_value(reader, depth))
            return 0;
    return found == 0 && write_fields(reader, &fields, depth);
}

static int write_array(Reader *reader, int depth) {
    int is_first = 1, found, written = 0;
    *reader->out++ = '[';
    while ((found = next_value(reader, &is_first)) > 0) {
        if (written++)
            *reader->out++ = ',';
        if (!write_value(reader, depth))
            return 0;
    }
    *reader->out++ = ']';
    return found == 0;
}

static int write_value(Reader *reader, int depth) {
    const uint8_t *begin = reader->at;
    if (depth == 0 || begin == reader->end)
        return 0;
    if (*begin == '{')
        return write_object(reader, depth - 1);
    if (*begin == '[')
        return write_array(reader, depth - 1);
    if (*begin == '"') {
        *reader->out++ = '"';
        if (!read_string(reader, JSON) || reader->at - begin > MAX_STRING)
            return 0;
        *reader->out++ = '"';
        return 1;
    }
    if (!pass_value(reader, 1))
        return 0;
    size_t len = (size_t)(reader->at - begin);
    if (memchr(begin, '.', len) != NULL || (begin[0] == '-' && begin[1] == '0'))
        return 0; /* a number that has several forms */
    memcpy(reader->out, begin, len);
    reader->out += len;
    return 1;
}

/* messages ------------------------------------------------------------------------------------------------------- */

/* A part of text, whose kind may stand before the text or behind it. */
static int write_part(Reader *reader) {
    int is_first = 1, found, has_kind = 0, has_text = 0;
    Span name, kind;
    while ((found = next_field(reader, &is_first, &name)) > 0) {
        if (IS(name, "type")) {
            if (has_kind++ || !read_name(reader, &kind))
                return 0;
            if (!IS(kind, "text") && (reader->api == MESSAGES || (!IS(kind, "input_text") && !IS(kind, "output_text"))))
                return 0;
        } else if (IS(name, "text")) {
            if (has_text++ || !write_text(reader))
                return 0;
        } else if (!pass_value(reader, MAX_DEPTH)) {
            return 0;
        }
    }
    return found == 0 && has_kind && has_text;
}

/* A text of a system message that has a line by which one client's requests differ is not plain. */
static int is_billed(const Reader *reader, const uint8_t *begin) {
    size_t len = sizeof BILLING_HEADER - 1;
    return (size_t)(reader->out - begin) >= len && memcmp(begin, BILLING_HEADER, len) == 0;
}

static int write_content(Reader *reader, Span role) {
    int is_system = IS(role, "system"), is_answer = reader->api == RESPONSES && IS(role, "assistant");
    uint8_t *begin = reader->out;
    if (is_next(reader, '"'))
        return write_text(reader) && !(is_system && is_billed(reader, begin));
    if (is_next(reader, 'n'))
        return reader->api == CHAT && pass_word(reader, "null");
    int is_first = 1, found, parts = 0;
    while ((found = next_value(reader, &is_first)) > 0) {
        uint8_t *before = reader->out;
        reader->parts++;
        if (parts)
            *reader->out++ = '\n';
        begin = reader->out;
        if ((is_answer && parts) || !write_part(reader) || (is_system && is_billed(reader, begin)))
            return 0;
        if (reader->api == MESSAGES && reader->out == begin)
            reader->out = before; /* these leave empty texts out */
        else
            parts++;
    }
    return found == 0 && (parts || reader->api == CHAT);
}

static void write_opening(Reader *reader, Span role) {
    *reader->out++ = MESSAGE;
    memcpy(reader->out, role.data, role.len);
    reader->out += role.len;
    *reader->out++ = FIELD;
}

/* Writes what was read already. */
static int write_later(Reader *reader, const uint8_t *content, Span role, const Fields *fields) {
    Py_ssize_t values = reader->values, commas = reader->commas;
    const uint8_t *end = reader->at;
    if (content != NULL) {
        reader->at = content;
        if (!write_content(reader, role))
            return 0;
        reader->at = end;
    }
    if (fields->count) {
        *reader->out++ = FIELD;
        if (!write_fields(reader, fields, MAX_DEPTH))
            return 0;
    }
    reader->values = values;
    reader->commas = commas;
    return 1;
}

/* Writes a message; in a chat, also the further fields that it has. */
static int write_message(Reader *reader) {
    int is_first = 1, found, has_role = 0, has_content = 0, has_kind = 0;
    const uint8_t *later = NULL; /* the content, where it stands before the role */
    Fields fields = {.count = 0};
    Span name, role = {NULL, 0}, kind;
    while ((found = next_field(reader, &is_first, &name)) > 0) {
        if (IS(name, "role")) {
            if (has_role++ || !read_name(reader, &role))
                return 0;
            if (reader->api == MESSAGES && IS(role, "system"))
                return 0;
            write_opening(reader, role);
        } else if (IS(name, "content")) {
            if (has_content++)
                return 0;
            later = has_role ? NULL : reader->at;
            if (!(has_role ? write_content(reader, role) : pass_value(reader, MAX_DEPTH)))
                return 0;
        } else if (reader->api == RESPONSES && IS(name, "type")) {
            if (has_kind++ || !read_name(reader, &kind) || !IS(kind, "message"))
                return 0;
        } else {
            int is_null = is_next(reader, 'n');
            if (reader->api == CHAT) {
                if ((IS(name, "tool_calls") && !is_null && !is_next(reader, '[')) ||
                    (IS(name, "name") && !is_null && !is_next(reader, '"')))
                    return 0;
                if (!add_field(&fields, name, is_null ? NULL : reader->at))
                    return 0;
            }
            if (!pass_value(reader, MAX_DEPTH))
                return 0;
        }
    }
    if (found < 0 || !has_role || (!has_content && reader->api != CHAT))
        return 0;
    int kept = 0, has_more = has_role + has_content + fields.count > 2;
    for (int place = 0; place < fields.count; place++)
        if (fields.of[place].value != NULL && has_more)
            fields.of[kept++] = fields.of[place];
    fields.count = kept;
    return write_later(reader, later, role, &fields);
}

/* Python --------------------------------------------------------------------------------------------------------- */

/* Passes to the first item of the first list of this name. */
static int pass_to_list(Reader *reader, Span quoted) {
    for (int tries = 0; tries < MAX_LISTS; tries++) {
        const uint8_t *found = memmem(reader->at, (size_t)(reader->end - reader->at), quoted.data, quoted.len);
        if (found == NULL)
            return 0;
        reader->at = found + quoted.len;
        Reader ahead = *reader;
        if (pass(&ahead, ':') && pass(&ahead, '[')) {
            *reader = ahead;
            return 1;
        }
    }
    return 0;
}

static PyObject *frame_of(Span body, const uint8_t *begin, const uint8_t *end, Span only) {
    size_t head = (size_t)(begin - body.data), tail = (size_t)(body.data + body.len - end);
    PyObject *frame = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(head + only.len + tail));
    if (frame == NULL)
        return NULL;
    char *to = PyBytes_AsString(frame);
    memcpy(to, body.data, head);
    memcpy(to + head, only.data, only.len);
    memcpy(to + head + only.len, end, tail);
    return frame;
}

static PyObject *read_list(Span body, Span quoted, Span only, int api) {
    Reader reader = {body.data, body.data + body.len, NULL, 0, 0, 0, api};
    if (!pass_to_list(&reader, quoted))
        Py_RETURN_NONE;
    const uint8_t *begin = reader.at, *end;
    /* Of each message less is written than is read: its braces alone make up for what is written around its role. */
    uint8_t *text = malloc((size_t)(reader.end - begin) + 2 * STEP);
    if (text == NULL)
        return PyErr_NoMemory();
    reader.out = text;
    int is_plain;
    for (;;) {
        is_plain = write_message(&reader);
        end = reader.at;
        pass_blanks(&reader);
        if (!is_plain || is_next(&reader, ']') || !(is_plain = pass(&reader, ',')))
            break;
    }
    PyObject *made = NULL, *frame = is_plain ? frame_of(body, begin, end, only) : NULL;
    if (frame != NULL)
        made = Py_BuildValue("(Ny#)", frame, (const char *)text, (Py_ssize_t)(reader.out - text));
    free(text);
    if (is_plain)
        return made;
    Py_RETURN_NONE;
}

/* Adds a place behind a message: what was read before it, where it is in the body, and bytes of the text. */
static int add_place(PyObject *places, Py_ssize_t messages, const Reader *reader, const uint8_t *body, const uint8_t *text) {
    Py_ssize_t end = reader->at - body, written = reader->out - text;
    PyObject *place =
        Py_BuildValue("(nnnnnn)", messages, reader->parts, end, written, reader->values, reader->commas + messages);
    if (place == NULL)
        return -1;
    int failed = PyList_Append(places, place);
    Py_DECREF(place);
    return failed;
}

/* Reads messages from one's begin to the list's end; notes a place about every ``stretch`` bytes, and the end. */
static PyObject *read_items(Span body, Py_ssize_t begin, Py_ssize_t stretch, int api) {
    Reader reader = {body.data + begin, body.data + body.len, NULL, 0, 0, 0, api};
    uint8_t *text = malloc((size_t)(reader.end - reader.at) + 2 * STEP);
    PyObject *places = PyList_New(0), *made = NULL;
    if (text == NULL || places == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    reader.out = text;
    Py_ssize_t messages = 0;
    const uint8_t *noted = reader.at;
    int is_plain, is_last = 0;
    do {
        is_plain = write_message(&reader);
        messages++;
        Reader ahead = reader;
        pass_blanks(&ahead);
        is_last = is_next(&ahead, ']');
        if (is_plain && (is_last || reader.at - noted >= stretch)) {
            if (add_place(places, messages, &reader, body.data, text) < 0)
                goto done;
            noted = reader.at;
        }
        if (!is_last && !pass(&reader, ','))
            is_plain = 0;
    } while (is_plain && !is_last);
    if (is_plain) {
        made = Py_BuildValue("(y#O)", (const char *)text, (Py_ssize_t)(reader.out - text), places);
    } else {
        Py_INCREF(Py_None);
        made = Py_None;
    }
done:
    free(text);
    Py_XDECREF(places);
    return made;
}

static PyObject *plain_items(PyObject *Py_UNUSED(module), PyObject *args) {
    Span body;
    Py_ssize_t body_len, begin, stretch;
    int api;
    if (!PyArg_ParseTuple(args, "y#nni", &body.data, &body_len, &begin, &stretch, &api))
        return NULL;
    if (begin < 0 || begin > body_len) {
        PyErr_SetString(PyExc_ValueError, "the first message is beyond the body");
        return NULL;
    }
    body.len = (size_t)body_len;
    return read_items(body, begin, stretch, api);
}

static PyObject *plain_list(PyObject *Py_UNUSED(module), PyObject *args) {
    Span body, quoted, only;
    Py_ssize_t body_len, quoted_len, only_len;
    int api;
    if (!PyArg_ParseTuple(args, "y#y#y#i", &body.data, &body_len, &quoted.data, &quoted_len, &only.data, &only_len, &api))
        return NULL;
    body.len = (size_t)body_len;
    quoted.len = (size_t)quoted_len;
    only.len = (size_t)only_len;
    return read_list(body, quoted, only, api);
}

static PyMethodDef functions[] = {
    {"plain_items", plain_items, METH_VARARGS, NULL},
    {"plain_list", plain_list, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "dualmap.api_bodies._plain_list",
    .m_methods = functions,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__plain_list(void) {
    return PyModuleDef_Init(&module);
}
