/* Heads of messages that can be read in one way only, and fields written one behind the other.
 *
 * This refuses nothing: a head that is not plain is none of its business, and the parser of HTTP (llhttp) reads it, with
 * every check of router/http/request_reader.py and upstream.py. What is plain is a part of what that parser accepts, and
 * both make the same of it:
 *
 *   - the whole head is there, and every line ends with CR LF
 *   - POST in HTTP/1.1, or a final status that has a body; a body of the one Content-Length, in digits alone; that of an
 *     answer may be chunked instead
 *   - one Host in a request; no other coding of the transfer, no offer to upgrade, nothing to expect, no connection to
 *     close
 *   - names of fields are tokens, values have no control characters and no blanks at their end
 *
 * Only the bytes of the head are looked at. Objects are made once all of it has been read.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define MAX_FIELDS 128
#define MAX_NAME_BYTES 64
#define MAX_DIGITS 15
#define STATUS_LINE_BYTES 13 /* "HTTP/1.1 200 " */

typedef struct {
    const uint8_t *name, *value;
    size_t name_len, value_len;
} Field;

typedef struct {
    Field fields[MAX_FIELDS];
    size_t count;
    const uint8_t *end;  /* of the head, its empty line included */
    Py_ssize_t body_len; /* -1: no length is named */
    int hosts, is_chunked;
} Head;

/* Names of fields that most messages have: their objects are made once. */
static const char *const KNOWN[] = {
    "accept", "accept-encoding", "authorization", "cache-control", "connection", "content-length", "content-type",
    "date", "host", "server", "traceparent", "user-agent", "via", "x-api-key", "x-forwarded-for", "x-forwarded-proto",
    "x-real-ip", "x-request-id", "x-session-id", "x-stainless-arch", "x-stainless-async", "x-stainless-lang",
    "x-stainless-os", "x-stainless-package-version", "x-stainless-read-timeout", "x-stainless-retry-count",
    "x-stainless-runtime", "x-stainless-runtime-version",
};
#define KNOWN_COUNT (sizeof KNOWN / sizeof *KNOWN)

typedef struct {
    PyObject *known[KNOWN_COUNT];
    size_t lengths[KNOWN_COUNT];
} State;

/* reading -------------------------------------------------------------------------------------------------------- */
/* The lower-case form of a token's byte; 0: no token has it. */
static uint8_t token_byte(uint8_t byte) {
    if (byte >= 'A' && byte <= 'Z')
        return byte | 0x20;
    if ((byte >= 'a' && byte <= 'z') || (byte >= '0' && byte <= '9'))
        return byte;
    return byte && strchr("!#$%&'*+-.^_`|~", byte) ? byte : 0;
}

static int is_value_byte(uint8_t byte) {
    return (byte >= 0x20 && byte != 0x7f) || byte == '\t';
}

static int is_named(const Field *field, const char *name) {
    size_t len = strlen(name);
    if (field->name_len != len)
        return 0;
    for (size_t at = 0; at < len; at++)
        if (token_byte(field->name[at]) != (uint8_t)name[at])
            return 0;
    return 1;
}

/* Whether the field leaves the head plain. */
static int is_plain(const Field *field, Head *head) {
    switch (field->name_len) {
    case 4:
        head->hosts += is_named(field, "host");
        return 1;
    case 6:
        return !is_named(field, "expect");
    case 7:
        return !is_named(field, "upgrade");
    case 10:
        return !is_named(field, "connection") ||
               (field->value_len == 10 && memcmp(field->value, "keep-alive", 10) == 0);
    case 14:
        if (!is_named(field, "content-length"))
            return 1;
        if (head->body_len >= 0 || field->value_len == 0 || field->value_len > MAX_DIGITS)
            return 0;
        head->body_len = 0;
        for (size_t at = 0; at < field->value_len; at++) {
            uint8_t digit = field->value[at] - '0';
            if (digit > 9)
                return 0;
            head->body_len = 10 * head->body_len + digit;
        }
        return 1;
    case 16:
        return !is_named(field, "proxy-connection");
    case 17:
        if (!is_named(field, "transfer-encoding"))
            return 1;
        if (head->is_chunked || field->value_len != 7 || memcmp(field->value, "chunked", 7) != 0)
            return 0;
        return head->is_chunked = 1;
    default:
        return 1;
    }
}

/* Read the fields from a line's begin on; 0 where the head is not plain, or its end has not come. */
static int read_fields(const uint8_t *at, const uint8_t *end, size_t most, Head *head) {
    head->count = 0;
    head->hosts = head->is_chunked = 0;
    head->body_len = -1;
    for (;;) {
        if (end - at >= 2 && at[0] == '\r' && at[1] == '\n') {
            head->end = at + 2;
            return 1;
        }
        if (head->count == most)
            return 0;
        Field *field = &head->fields[head->count++];
        field->name = at;
        while (at < end && token_byte(*at))
            at++;
        field->name_len = (size_t)(at - field->name);
        if (field->name_len == 0 || field->name_len > MAX_NAME_BYTES || at == end || *at != ':')
            return 0;
        for (at++; at < end && (*at == ' ' || *at == '\t'); at++)
            ;
        field->value = at;
        while (at < end && is_value_byte(*at))
            at++;
        field->value_len = (size_t)(at - field->value);
        if (end - at < 2 || at[0] != '\r' || at[1] != '\n')
            return 0;
        if (field->value_len == 0 || at[-1] == ' ' || at[-1] == '\t' || !is_plain(field, head))
            return 0;
        at += 2;
    }
}

/* objects -------------------------------------------------------------------------------------------------------- */
static PyObject *name_of(const Field *field, const State *state) {
    char name[MAX_NAME_BYTES];
    for (size_t at = 0; at < field->name_len; at++)
        name[at] = (char)token_byte(field->name[at]);
    for (size_t each = 0; each < KNOWN_COUNT; each++)
        if (state->lengths[each] == field->name_len && memcmp(KNOWN[each], name, field->name_len) == 0) {
            Py_INCREF(state->known[each]);
            return state->known[each];
        }
    return PyBytes_FromStringAndSize(name, (Py_ssize_t)field->name_len);
}

/* The fields as a list, and by name: of several of a name the first one, or the last one. */
static int objects_of(const Head *head, const State *state, int first_counts, PyObject **list, PyObject **index) {
    *list = PyList_New((Py_ssize_t)head->count);
    *index = PyDict_New();
    if (*list == NULL || *index == NULL)
        goto failed;
    for (size_t each = 0; each < head->count; each++) {
        const Field *field = &head->fields[each];
        PyObject *name = name_of(field, state);
        PyObject *value = PyBytes_FromStringAndSize((const char *)field->value, (Py_ssize_t)field->value_len);
        PyObject *pair = name && value ? PyTuple_Pack(2, name, value) : NULL;
        int found = pair == NULL ? -1 : first_counts ? PyDict_Contains(*index, name) : 0;
        int done = found < 0 ? -1 : found ? 0 : PyDict_SetItem(*index, name, value);
        Py_XDECREF(name);
        Py_XDECREF(value);
        if (done < 0) {
            Py_XDECREF(pair);
            goto failed;
        }
        if (PyList_SetItem(*list, (Py_ssize_t)each, pair) < 0) /* which takes the pair in any case */
            goto failed;
    }
    return 1;
failed:
    Py_CLEAR(*list);
    Py_CLEAR(*index);
    return 0;
}

static int takes_bytes(PyObject *const *args, Py_ssize_t count, Py_ssize_t expected) {
    if (count == expected && PyBytes_Check(args[0]))
        return 1;
    PyErr_SetString(PyExc_TypeError, "wrong arguments");
    return 0;
}

static PyObject *read_request(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (!takes_bytes(args, count, 3))
        return NULL;
    const uint8_t *data = (const uint8_t *)PyBytes_AsString(args[0]);
    Py_ssize_t len = PyBytes_Size(args[0]), max_head_bytes = PyLong_AsSsize_t(args[1]);
    Py_ssize_t max_fields = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        return NULL;
    size_t head_len = (size_t)(len < max_head_bytes ? len : max_head_bytes > 0 ? max_head_bytes : 0);
    if (head_len < 5 || memcmp(data, "POST ", 5) != 0)
        Py_RETURN_NONE;
    const uint8_t *target = data + 5, *end = data + head_len;
    const uint8_t *blank = memchr(target, ' ', head_len - 5);
    if (blank == NULL || end - blank < 11 || memcmp(blank, " HTTP/1.1\r\n", 11) != 0)
        Py_RETURN_NONE;
    Head head;
    size_t most = max_fields < 0 ? 0 : max_fields > MAX_FIELDS ? MAX_FIELDS : (size_t)max_fields;
    if (!read_fields(blank + 11, end, most, &head) || head.hosts != 1 || head.body_len < 0 || head.is_chunked)
        Py_RETURN_NONE;
    PyObject *fields, *index;
    if (!objects_of(&head, PyModule_GetState(module), 1, &fields, &index))
        return NULL;
    return Py_BuildValue(
        "(y#NNnn)", (const char *)target, (Py_ssize_t)(blank - target), fields, index, (Py_ssize_t)(head.end - data),
        head.body_len
    );
}

static PyObject *read_answer(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (!takes_bytes(args, count, 2))
        return NULL;
    const uint8_t *data = (const uint8_t *)PyBytes_AsString(args[0]);
    Py_ssize_t len = PyBytes_Size(args[0]), max_head_bytes = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred())
        return NULL;
    const uint8_t *end = data + (len < max_head_bytes ? len : max_head_bytes > 0 ? max_head_bytes : 0);
    if (end - data < STATUS_LINE_BYTES || memcmp(data, "HTTP/1.1 ", 9) != 0)
        Py_RETURN_NONE;
    int status = 0;
    for (size_t at = 9; at < 12; at++) {
        uint8_t digit = data[at] - '0';
        if (digit > 9)
            Py_RETURN_NONE;
        status = 10 * status + digit;
    }
    if (status < 200 || status > 599 || status == 204 || status == 304 || data[12] != ' ')
        Py_RETURN_NONE;
    const uint8_t *at = data + STATUS_LINE_BYTES;
    while (at < end && is_value_byte(*at))
        at++;
    Head head;
    if (end - at < 2 || at[0] != '\r' || at[1] != '\n' || !read_fields(at + 2, end, MAX_FIELDS, &head))
        Py_RETURN_NONE;
    if ((head.body_len < 0) != head.is_chunked)
        Py_RETURN_NONE;
    PyObject *fields, *index;
    if (!objects_of(&head, PyModule_GetState(module), 0, &fields, &index))
        return NULL;
    return Py_BuildValue("(iNNnn)", status, fields, index, (Py_ssize_t)(head.end - data), head.body_len);
}

/* writing -------------------------------------------------------------------------------------------------------- */
/* Name and value of a field in a list; 0 where it is none. */
static int field_of(PyObject *fields, Py_ssize_t place, PyObject **name, PyObject **value) {
    PyObject *field = PyList_GetItem(fields, place);
    if (field != NULL && PyTuple_Check(field) && PyTuple_Size(field) == 2) {
        *name = PyTuple_GetItem(field, 0);
        *value = PyTuple_GetItem(field, 1);
        if (PyBytes_Check(*name) && PyBytes_Check(*value))
            return 1;
    }
    if (field != NULL)
        PyErr_SetString(PyExc_TypeError, "a field is a tuple of two bytes");
    return 0;
}

static char *put(char *at, PyObject *bytes) {
    size_t len = (size_t)PyBytes_Size(bytes);
    memcpy(at, PyBytes_AsString(bytes), len);
    return at + len;
}

static PyObject *without(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (count != 2 || !PyList_Check(args[0]) || !PyAnySet_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "wrong arguments");
        return NULL;
    }
    PyObject *kept = PyList_New(0);
    for (Py_ssize_t place = 0; kept != NULL && place < PyList_Size(args[0]); place++) {
        PyObject *name, *value;
        int dropped = field_of(args[0], place, &name, &value) ? PySet_Contains(args[1], name) : -1;
        if (dropped < 0 || (!dropped && PyList_Append(kept, PyList_GetItem(args[0], place)) < 0))
            Py_CLEAR(kept);
    }
    return kept;
}

static PyObject *lines(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || !PyBytes_Check(args[0]) || !PyList_Check(args[1]) || !PyBytes_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "wrong arguments");
        return NULL;
    }
    PyObject *name, *value;
    Py_ssize_t len = PyBytes_Size(args[0]) + PyBytes_Size(args[2]), places = PyList_Size(args[1]);
    for (Py_ssize_t place = 0; place < places; place++) {
        if (!field_of(args[1], place, &name, &value))
            return NULL;
        len += PyBytes_Size(name) + PyBytes_Size(value) + 4;
    }
    PyObject *made = PyBytes_FromStringAndSize(NULL, len);
    if (made == NULL)
        return NULL;
    char *at = put(PyBytes_AsString(made), args[0]);
    for (Py_ssize_t place = 0; place < places; place++) {
        if (!field_of(args[1], place, &name, &value)) {
            Py_DECREF(made);
            return NULL;
        }
        at = put(at, name);
        *at++ = ':';
        *at++ = ' ';
        at = put(at, value);
        *at++ = '\r';
        *at++ = '\n';
    }
    put(at, args[2]);
    return made;
}

/* Python --------------------------------------------------------------------------------------------------------- */
#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    FUNCTION(read_request), FUNCTION(read_answer), FUNCTION(without), FUNCTION(lines), {NULL, NULL, 0, NULL},
};

static int begin(PyObject *module) {
    State *state = PyModule_GetState(module);
    for (size_t each = 0; each < KNOWN_COUNT; each++) {
        state->lengths[each] = strlen(KNOWN[each]);
        state->known[each] = PyBytes_FromStringAndSize(KNOWN[each], (Py_ssize_t)state->lengths[each]);
        if (state->known[each] == NULL)
            return -1;
    }
    return 0;
}

static void end(void *module) {
    State *state = PyModule_GetState(module);
    for (size_t each = 0; state != NULL && each < KNOWN_COUNT; each++)
        Py_CLEAR(state->known[each]);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, begin}, {0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "dualmap.router.http._plain_heads",
    .m_size = sizeof(State),
    .m_methods = functions,
    .m_slots = module_slots,
    .m_free = end,
};

PyMODINIT_FUNC PyInit__plain_heads(void) {
    return PyModuleDef_Init(&module);
}
