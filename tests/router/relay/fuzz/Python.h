/* What router/relay/relay.c needs of Python to be compiled without it: the fuzzer drives what is below Python's side. */
#ifndef FUZZ_PYTHON_H
#define FUZZ_PYTHON_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <sys/types.h>

typedef ssize_t Py_ssize_t;
typedef struct _typeobject PyTypeObject;
typedef struct {
    Py_ssize_t ob_refcnt;
    PyTypeObject *ob_type;
} PyObject;
struct _typeobject {
    PyObject ob_base;
};
#define PyObject_HEAD PyObject ob_base;
typedef struct {
    void *buf;
    Py_ssize_t len;
} Py_buffer;
typedef PyObject *(*PyCFunction)(PyObject *, PyObject *);
typedef PyObject *(*allocfunc)(PyTypeObject *, Py_ssize_t);
typedef void (*freefunc)(void *);
typedef struct {
    const char *ml_name;
    PyCFunction ml_meth;
    int ml_flags;
    const char *ml_doc;
} PyMethodDef;
typedef struct {
    int slot;
    void *pfunc;
} PyType_Slot;
typedef struct {
    const char *name;
    int basicsize, itemsize;
    unsigned flags;
    PyType_Slot *slots;
} PyType_Spec;
typedef struct {
    int slot;
    void *value;
} PyModuleDef_Slot;
typedef struct PyModuleDef {
    PyObject m_base;
    const char *m_name, *m_doc;
    Py_ssize_t m_size;
    PyMethodDef *m_methods;
    PyModuleDef_Slot *m_slots;
} PyModuleDef;

#define PyModuleDef_HEAD_INIT {1, NULL}
#define Py_UNUSED(name) _unused_##name __attribute__((unused))
#define Py_RETURN_NONE return NULL
#define METH_VARARGS 1
#define METH_NOARGS 4
#define METH_O 8
#define Py_tp_alloc 47
#define Py_tp_dealloc 52
#define Py_tp_methods 64
#define Py_tp_new 65
#define Py_tp_free 74
#define Py_mod_exec 2
#define Py_TPFLAGS_DEFAULT 0
#define Py_TYPE(object) ((object)->ob_type)
#define Py_XDECREF(object) ((void)(object))
#define Py_DECREF(object) ((void)(object))
#define PyExc_OSError NULL
#define PyMODINIT_FUNC PyObject *

static inline PyObject *nothing(void) {
    return NULL;
}
#define PyBytes_FromStringAndSize(data, len) ((void)(data), (void)(len), nothing())
#define Py_BuildValue(...) built(__VA_ARGS__)
static inline PyObject *built(const char *format, ...) {
    (void)format;
    return NULL;
}
#define PyArg_ParseTuple(...) parsed(__VA_ARGS__)
static inline int parsed(PyObject *args, const char *format, ...) {
    (void)args, (void)format;
    return 0;
}
#define PyErr_SetFromErrno(error) nothing()
#define PyErr_NoMemory() nothing()
#define PyErr_Occurred() nothing()
#define PyBuffer_Release(buffer) ((void)(buffer))
#define PyLong_FromLong(number) ((void)(number), nothing())
#define PyLong_FromUnsignedLongLong(number) ((void)(number), nothing())
#define PyLong_AsUnsignedLongLong(object) ((void)(object), 0ULL)
#define PyBool_FromLong(number) ((void)(number), nothing())
#define PyList_New(size) nothing()
#define PyList_Append(list, object) ((void)(list), (void)(object), 0)
#define PyType_GetSlot(type, slot) ((void)(type), (void *)NULL)
#define PyType_FromSpec(spec) ((void)(spec), nothing())
#define PyModule_AddObjectRef(module, name, object) ((void)(module), (void)(object), 0)
#define PyModule_AddIntConstant(module, name, value) ((void)(module), (void)(name), (void)(value), 0)
#define PyModuleDef_Init(def) ((void)(def), nothing())

#endif
